"""`qreward plan`: what a person reads, the files that are written, and how mistakes are told."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..kit import each_of, wait_until

LIMITS = {"requests_per_minute": 30, "concurrency": 16}


@pytest.fixture
def config(write_config):
    source = {"limits": LIMITS, "price": {"per_request": 0.01}, "api_key_env": "A_KEY_THAT_IS_NOT_SET"}
    return write_config({"a": "http://planned.invalid/v1"}, source=source)


def test_a_plan_is_printed(run_cli, config):
    exact = ["--latency", "1", "--tokens", "100", "--spread", "0", "--errors", "0", "--stragglers", "0", "--seeds", "1"]
    result = run_cli("plan", config, "--samples", 45, *exact)
    assert (result.exit_code, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    for part in (
        f"{config}: a step of 45 samples (judged: 45 by quality)",
        "takes 61.",
        "costs $0.45 ($10.00 per 1,000 samples)",
        "waits for the 30 requests a minute of a",
        "a 1.00s 45 100% - 16 of 16",
        "+30 requests/min on a",
        "rollouts: 100 tokens",
        "1 s at a (as given)",
        "a: no limit of tokens declared, so none is assumed",
    ):
        assert part in text
    lines = result.stdout.splitlines()
    assert max(map(len, lines[1:])) <= 100
    advice = lines[lines.index("what would help most") + 1 : lines.index("assumed") - 1]
    saved = [float(line.rsplit("->")[0].split()[-1]) - float(line.rsplit("->")[1].split()[0]) for line in advice]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > 20


def test_what_is_late_is_said(run_cli, write_config):
    path = write_config({"a": "http://x.invalid"}, source={"limits": LIMITS}, engine={"deadline_s": 30})
    result = run_cli("plan", path, "-n", 60, "--seeds", 1)
    assert "of the samples get no reward: engine.deadline_s is 30" in " ".join(result.stdout.split())


def test_the_plan_may_go_into_a_pipe(run_cli, config, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_text)
        result = run_cli("plan", config, "-n", 5, "--seeds", 1, "--json", pipe)
        assert result.exit_code == 0
        assert json.loads(read.result())["samples"] == 5


def test_the_plan_and_its_timeline_are_written_for_real_rollouts(run_cli, config, write_rows, row, tmp_path):
    rows = write_rows([row(number) for number in range(5)])
    plot, as_json = tmp_path / "plan.png", tmp_path / "plan.json"
    files = ("--plot", plot, "--json", as_json)
    result = run_cli("plan", config, "-n", 20, "--seeds", 2, "--tokens", f"file:{rows}", *files)
    assert result.exit_code == 0
    assert f"the rollouts of {rows}" in result.stdout
    assert f"the timeline is in {plot}" in result.stderr
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert plot.stat().st_size > 10_000
    written = json.loads(as_json.read_text())
    assert (written["samples"], [source["name"] for source in written["sources"]]) == (20, ["a"])
    assert written["step_s"]["p50"] > 0


@each_of(
    ("options", "message"),
    [
        (["--tokens", "many"], "--tokens 'many' is no distribution of lengths"),
        (["--latency", "b=2"], "--latency 'b=2': there is no source 'b'; there are a"),
        (["--tokens", "file:missing.jsonl"], "missing.jsonl"),
        (["--plot", "missing/plan.png"], "there is no directory 'missing'"),
        (["--json", "missing/plan.json"], "there is no directory 'missing'"),
        (["--json", "config.yaml"], "config.yaml: this file is an input; name another output file"),
        (["--tokens", "file:in.jsonl", "--json", "in.jsonl"], "in.jsonl: this file is an input; name another output"),
        (["--data-source", "x=-1"], "a share must be above 0"),
    ],
)
def test_mistakes_are_one_message(run_cli, config, write_rows, row, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    write_rows([row(1)])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    result = run_cli("plan", config, "-n", 4, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_without_matplotlib_nothing_is_simulated_first(run_cli, config, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else real(name, *more)
    )
    result = run_cli("plan", config, "-n", 4, "--plot", "plan.png")
    assert (result.exit_code, result.stdout) == (2, "")
    assert 'pip install "qreward-plugins[plot]"' in result.stderr


def test_ctrl_c_ends_it(start_cli, config, tmp_path):
    """With rehearsals under way in processes of their own."""
    process = start_cli("plan", config, "-n", 3000, "--seeds", 50, "--json", tmp_path / "plan.json")
    threads = Path(f"/proc/{process.pid}/task")
    if not (threads / str(process.pid) / "children").exists():
        pytest.skip("needs /proc, which lists the children of a process")
    wait_until(lambda: any(children.read_text() for children in threads.glob("*/children")))
    code, out, errors = process.end(signal.SIGINT)
    assert (code, out) == (130, "")
    assert "Traceback" not in errors
    assert not (tmp_path / "plan.json").exists()
