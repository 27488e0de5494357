"""`qreward plan`: what a person reads, the files that are written, and how mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from qreward_plugins import Scored, Verdict
from qreward_plugins.cli import plan as module
from qreward_plugins.samples.spent import Spent, Usage
from qreward_plugins.scheduling.jobs import PastAttempt
from qreward_plugins.sources.base import Request

from ..kit import each_of, make_sample, record

LIMITS = {"requests_per_minute": 30, "concurrency": 16}


@pytest.fixture
def config(write_config):
    source = {"limits": LIMITS, "price": {"per_request": 0.01}, "api_key_env": "A_KEY_THAT_IS_NOT_SET"}
    return write_config({"a": "http://planned.invalid/v1"}, source=source, engine={"deadline_s": 60})


def test_a_plan_is_printed(run_cli, config):
    exact = ["--latency", "1", "--tokens", "100", "--seeds", "1"]
    result = run_cli("plan", config, "--samples", 45, *exact)
    assert (result.exit_code, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    for part in (
        f"{config}: a step of 45 samples (judged: 45 by quality)",
        "takes 61.",
        "costs $0.45 ($10.00 per 1,000 samples)",
        "waits for requests a minute of a",
        "but 33% of the samples get no reward: engine.deadline_s is 60",
        "a 1.00s 45 100% - 16 of 16",
        "+30 requests/min on a",
        "rollouts: 100 tokens",
        "a: an average request takes 1 s (given)",
        "a: no tokens_per_minute declared, so none is assumed",
    ):
        assert part in text
    lines = result.stdout.splitlines()
    advice = lines[lines.index("what would help most") + 2 : lines.index("assumed") - 1]
    saved = [float(line.rsplit("->")[0].split()[-1]) - float(line.rsplit("->")[1].split()[0]) for line in advice]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > 20


def test_without_a_terminal_lines_tell_how_far_it_is(run_cli, config, monkeypatch):
    monkeypatch.setattr(module, "_LINE_EVERY_S", 0.0)
    result = run_cli("plan", config, "-n", 8, "--seeds", 2)
    assert result.stderr.splitlines()[:3] == [f"rehearsed {done} of 2 steps" for done in range(3)]


def test_the_plan_and_its_timeline_are_written_for_real_rollouts(run_cli, config, write_rows, row, tmp_path):
    rows, plot = write_rows([row(number) for number in range(5)]), tmp_path / "plan.png"
    options = ("-n", 20, "--seeds", 2, "--tokens", f"file:{rows}", "--plot", plot, "--json")
    result = run_cli("plan", config, *options)
    assert result.exit_code == 0
    assert f"the timeline is in {plot}" in result.stderr
    assert plot.read_bytes()[:4] == b"\x89PNG"
    found = json.loads(result.stdout)
    assert (found["samples"], [source["name"] for source in found["sources"]]) == (20, ["a"])
    assert found["step_s"]["p50"] > 0
    assert any(f"the rollouts of {rows}" in note for note in found["notes"])


@each_of(
    ("options", "message"),
    [
        ([], "write either --samples N, or --against JOURNAL"),
        (["--against", "missing.sqlite"], "the journal missing.sqlite cannot be opened"),
        (["--against", "empty.sqlite"], "empty.sqlite has no training steps"),
        (["--against", "empty.sqlite", "--plot", "plan.png"], "--plot draws the plan of one step"),
        (["-n", 4, "--start", 90], "no source of kind replicas is asked, so no servers start; leave out --start"),
        (["-n", 4, "--tokens", "many"], "--tokens 'many' is no distribution of lengths"),
        (["-n", 4, "--latency", "b=2"], "--latency 'b=2': there is no source 'b'; there are a"),
        (["-n", 4, "--tokens", "file:missing.jsonl"], "missing.jsonl"),
        (["-n", 4, "--plot", "missing/plan.png"], "there is no directory 'missing'"),
        (["-n", 4, "--data-source", "x=-1"], "a share must be above 0"),
    ],
)
def test_mistakes_are_one_message(run_cli, config, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    record(Path("empty.sqlite"), [])
    result = run_cli("plan", config, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


@pytest.fixture
def recorded(tmp_path):
    """A journal of three training steps and a validation, each of 40 samples in 5 s: 8 at a time, for a second each."""
    path, now = tmp_path / "verdicts.sqlite", [0.0]

    def samples():
        for step, split in ((1, "train"), (2, "train"), (3, "train"), (3, "val")):
            for number in range(40):
                latency_s = 1.0 + number // 8
                now[0] = 1e9 + 1000 * step + latency_s
                fields = {"response": "x" * 800, "step": step, "split": split, "data_source": "math"}
                sample = make_sample(id=f"{step} {number}", **fields)
                spent = Spent(latency_s=latency_s, attempts=1, usage=Usage(300, 100), cost_usd=0.01)
                times = (latency_s - 1, None, latency_s)
                past = PastAttempt("a", *times, "valid", False, "", spent.usage, 0.01, Request(sample), None)
                yield sample, Scored(Verdict(0.5, judge="quality", source="a", service_s=1.0, spent=spent)), [past]

    record(path, samples(), clock=lambda: now[0])
    return path


def test_the_steps_of_a_journal_stand_beside_their_plans(run_cli, config, recorded):
    tree = config.read_text().replace("requests_per_minute: 30", "requests_per_minute: 3000")
    config.write_text(tree.replace("concurrency: 16", "concurrency: 8"))
    options = ["--against", recorded, "--last", 2, "--seeds", 1, "--workers", 2]
    result = run_cli("plan", config, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    assert f"{recorded}: the latest 2 steps, each beside its plan by {config}" in text
    assert "2 40 5.00s" in text
    assert "40 40 16.0k 17.0k 0.4000 0.4000" in text
    found = json.loads(run_cli("plan", config, *options, "--json").stdout)
    assert [step["measured"]["number"] for step in found["steps"]] == [2, 3]
    assert found["errors"]["seconds"] == pytest.approx(0.0, abs=0.1)
    assert found["errors"]["tokens"] == pytest.approx(0.0, abs=0.1)
    assert "the plan is off by (median): time " in text
    assert "a: an average request takes 1 s (journal)" in text


def test_the_first_step_waits_for_servers(run_cli, config):
    tree = yaml.safe_load(config.read_text())
    tree["sources"] = {"own": {"kind": "replicas", "command": ["serve", "{port}", "{name}"], "model": "m"}}
    config.write_text(yaml.safe_dump(tree))
    found = json.loads(run_cli("plan", config, "-n", 8, "--seeds", 1, "--start", 90, "--json").stdout)
    assert found["first_step_s"] > 90
    result = run_cli("plan", config, "-n", 8, "--seeds", 1)
    assert "until the servers of own have started (--start)" in " ".join(result.stdout.split())
