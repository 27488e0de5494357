"""Commands on a configuration whose judge runs programs in a sandbox."""

from __future__ import annotations

import re
from pathlib import Path

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
