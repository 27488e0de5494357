"""Commands on a configuration whose judge runs programs in a sandbox."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from qreward_plugins.testing import JudgeServer

RECIPE = Path(__file__).parents[2] / "recipes" / "judges" / "code.yaml"


def test_a_sandbox_is_checked_offline_and_planned(run_cli, write_rows, tmp_path, monkeypatch):
    monkeypatch.setenv("QREWARD_JOURNAL", str(tmp_path / "journal.sqlite"))
    assert "valid, with 1 source, 1 judge" in run_cli("check", RECIPE, "--offline").stdout
    exact = ["--latency", "1", "--seeds", "1"]
    refused = run_cli("plan", RECIPE, "-n", 64, *exact)
    assert (refused.exit_code, "give real rollouts with --tokens file:PATH" in refused.stderr) == (2, True)
    # Rows with two tests, half of which have a program.
    tests = {"inputs": ["1", "2"], "outputs": ["1", "2"]}
    responses = ["none", "```\nprint(input())\n```"]
    rows = write_rows([{"prompt": "?", "response": text, "ground_truth": tests} for text in responses])
    planned = run_cli("plan", RECIPE, "-n", 64, "--tokens", f"file:{rows}", *exact)
    assert re.search(r"sandbox 1\.00s 6[4-7] ", " ".join(planned.stdout.split()))


def test_tests_in_a_column_are_planned_and_a_check_asks_with_a_row(run_cli, write_rows, tmp_path):
    with JudgeServer(lambda call: call.stdin) as server:
        tree = {
            "sources": {"box": {"kind": "sandbox", "url": f"{server.root_url}/run_code"}},
            "judges": {
                "code": {"kind": "code", "column": "a.tests", "max_tests": 3},
                "short": {"kind": "llm", "sources": "judge"},
                "both": {"kind": "sum", "weights": {"code": 1, "short": 0.1}},
            },
        }
        tree["sources"]["judge"] = {"kind": "openai", "base_url": server.base_url, "model": "judge"}
        path = tmp_path / "judges.yaml"
        path.write_text(yaml.safe_dump(tree))
        extras = {"a": {"tests": {"inputs": ["1", "2"], "outputs": ["1", "2"]}}}
        rows = write_rows([{"prompt": "?", "response": "```\np\n```", "extra_info": extras}])
        once = ["--seeds", 1, "--latency", 1]
        planned = run_cli("plan", path, "-n", 16, "--tokens", f"file:{rows}", *once)
        assert planned.exit_code == 0, planned.output
        assert re.search(r" 3[2-4] ", planned.stdout)
        del tree["judges"]["both"], tree["judges"]["short"], tree["sources"]["judge"]
        path.write_text(yaml.safe_dump(tree))
        checked = run_cli("check", path, "--rollouts", rows)
        assert (checked.exit_code, server.report().requests) == (0, 2), checked.output
