"""`qreward score` while it goes on: what a person sees of it, how it is killed or stopped in the middle, and how much
of a file it holds in memory.
"""

from __future__ import annotations

import asyncio
import gc
import io
import re
import signal
import sqlite3
import weakref
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console

from qreward_plugins import Sample
from qreward_plugins.cli import score as command
from qreward_plugins.cli.engines import progress_shown
from qreward_plugins.files import Rollout
from qreward_plugins.observers import SourceGauges, Statistics
from qreward_plugins.simulation import SimulatedSource, run
from qreward_plugins.system import threads
from qreward_plugins.testing import JudgeServer

from ..kit import NEVER_S, Stage, each_of, make_samples, now, scored_text, wait_until
from .conftest import exited, verdicts_in

ROWS, AT_ONCE, ANSWERED = 24, 4, 9


@pytest.fixture
def held_run(write_config, write_rows, row, tmp_path):
    """A run whose server keeps back its answers from the tenth on: yields the server, what waits until it does, and the
    command's arguments.
    """
    calls = []

    def scorer(call):
        calls.append(call)
        if len(calls) == ANSWERED + 1:
            server.hold()
        return 1.0

    with JudgeServer(scorer) as server:
        config = write_config({"a": server}, source={"limits": {"concurrency": AT_ONCE}})
        arguments = ("score", config, write_rows([row(n) for n in range(ROWS)]), "-o", tmp_path / "out.jsonl")

        def until_held():
            server.wait_for(lambda report: len(calls) > ANSWERED and report.in_flight == AT_ONCE, timeout_s=30)

        yield server, until_held, arguments


def test_after_sigkill_the_same_command_goes_on(held_run, start_cli, run_cli, read_rows, tmp_path):
    server, until_held, arguments = held_run
    process = start_cli(*arguments)
    until_held()
    journal = tmp_path / "out.jsonl.journal"
    # What is answered is written down within 50 ms.
    wait_until(lambda: verdicts_in(journal) == server.report().answered)
    process.end(signal.SIGKILL)
    paid, in_flight = verdicts_in(journal), server.report().requests - server.report().answered
    assert (paid >= 1, in_flight) == (True, AT_ONCE)
    assert not (tmp_path / "out.jsonl").exists()

    server.release()
    result = exited(run_cli(*arguments))
    assert f"({paid} of them from the journal)" in result.stdout
    assert server.report().requests == ROWS + in_flight
    scored = read_rows(tmp_path / "out.jsonl")
    assert [line["number"] for line in scored] == list(range(ROWS))
    assert {line["qreward"]["reward"] for line in scored} == {1.0}
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_a_stopped_run_says_how_to_go_on(held_run, stop_cli, run_cli, read_rows, tmp_path):
    server, until_held, arguments = held_run
    partial = tmp_path / "out.jsonl.partial"

    def ready():
        until_held()
        wait_until(lambda: verdicts_in(tmp_path / "out.jsonl.journal") == server.report().answered)

    result = stop_cli(ready, *arguments)
    assert (result.exit_code, result.stdout) == (130, "")
    errors = result.stderr
    assert "Run the same command again to go on" in errors
    written = read_rows(partial)
    assert written
    assert [line["number"] for line in written] == list(range(len(written)))
    assert f"stopped after {server.report().answered} of {ROWS} rows\n" in errors
    assert f"the first {len(written)}, in {partial}\n" in errors
    assert verdicts_in(tmp_path / "out.jsonl.journal") == server.report().answered

    server.release()
    assert run_cli(*arguments).exit_code == 0
    assert server.report().requests == ROWS + AT_ONCE


@pytest.mark.parametrize("stops", [False, True])
def test_a_run_whose_verdicts_are_not_in_the_journal_says_so(
    stops, write_config, write_rows, run_cli, stop_cli, row, tmp_path, monkeypatch
):
    """Another process locks the journal at the first call."""
    monkeypatch.setattr("qreward_plugins.journal.database.BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr("qreward_plugins.journal.writer.CLOSE_WITHIN_S", 0.05)
    calls, journal = [], tmp_path / "out.jsonl.journal"

    def scorer(call):
        if not calls:
            connection = sqlite3.connect(journal, isolation_level=None, check_same_thread=False)
            lock.enter_context(closing(connection)).execute("BEGIN IMMEDIATE")
        calls.append(call)
        if stops and len(calls) > ANSWERED:
            server.hold()
        return 1.0

    with ExitStack() as lock, JudgeServer(scorer) as server:
        config = write_config({"a": server}, source={"limits": {"concurrency": AT_ONCE}})
        arguments = ("score", config, write_rows([row(n) for n in range(ROWS)]), "-o", tmp_path / "out.jsonl")
        if stops:
            ready = partial(server.wait_for, lambda report: len(calls) > ANSWERED and report.in_flight, timeout_s=30)
            result = stop_cli(ready, *arguments)
        else:
            result = run_cli(*arguments)
    said = " ".join(result.stderr.split())
    assert "outcomes were not recorded: another process has locked the journal" in said
    assert ("verdicts so far: not all, in " in said, "no verdict is paid for twice" in said) == (stops, False)
    assert result.exit_code == (130 if stops else 2)


def test_a_file_is_never_in_memory_as_a_whole(run_cli, server, write_config, tmp_path, monkeypatch):
    class Row(dict):
        pass

    alive: weakref.WeakValueDictionary[int, Row] = weakref.WeakValueDictionary()
    most = 0

    def rollouts(_):
        nonlocal most
        for number in range(150):
            columns = Row(number=number)
            alive[number] = columns
            most = max(most, len(alive))
            yield Rollout(columns, Sample([{"role": "user", "content": f"{number}"}], f"{number}"))
            del columns

    monkeypatch.setattr(command, "check_rollouts", lambda *_, **__: 150)
    monkeypatch.setattr(command, "read_rollouts", rollouts)
    config = write_config({"a": server}, source={"limits": {"concurrency": 2}})
    assert run_cli("score", config, tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl").exit_code == 0
    gc.collect()
    # The engine's window is four times the concurrency; some rows are being read and one is being written.
    assert most <= 4 * 2 + 2 + 2 * threads.AT_ONCE
    assert len(alive) == 0
    assert server.report().requests == 150


def test_a_module_that_hangs_while_it_is_imported_can_be_stopped(start_cli, tmp_path):
    # The event loop stands still then, and could act on no signal.
    (tmp_path / "rewards.py").write_text(
        "import pathlib, threading\npathlib.Path('imported').touch()\nthreading.Event().wait()\n"
    )
    config = "sources: {f: {kind: function, function: 'rewards.py:score'}}\njudges: {j: {kind: function}}\n"
    (tmp_path / "config.yaml").write_text(config)
    process = start_cli("check", "config.yaml")
    wait_until((tmp_path / "imported").exists)
    code, _, err = process.end(signal.SIGTERM)
    assert code == -signal.SIGTERM
    assert "Traceback" not in err


# What a person sees while a run goes on, in a terminal of 80 columns and in a log


ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(sources, scored=0, failed=0):
    """An engine whose sources have these counts."""
    gauges = SourceGauges(state="up", in_flight=0, requests_share=None, tokens_share=None, paced=False)
    none = Statistics().snapshot(dict.fromkeys(sources, gauges), waiting=0)
    counted = {name: replace(none.sources[name], **counts) for name, counts in sources.items()}
    failures = {"infra/deadline": failed} if failed else {}
    told = replace(none, scored=scored, failed=failures, sources=counted)
    config = SimpleNamespace(engine=SimpleNamespace(deadline_s=300.0), sources={})
    return SimpleNamespace(statistics=lambda: told, config=config, stream_window=64)


def watch(engine, total, *, for_s, terminal=False):
    """What the display prints in `for_s` seconds of virtual time."""
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=terminal, color_system=None)

    async def main():
        async with progress_shown(console, total, engine):
            await asyncio.sleep(for_s)

    run(main())
    return [line for line in ANSI.sub("\n", console.file.getvalue()).replace("\r", "\n").splitlines() if line.strip()]


def test_a_log_gets_a_line_after_ten_seconds_and_for_every_minute():
    lines = watch(shown({"a": {"requests": 8, "in_flight": 8}}), 20, for_s=135)
    assert lines[0] == "0/20 (0%) in 0:00:10, about ? left; a up, 8 sent, 8 not answered yet"
    assert [line.split()[3] for line in lines] == ["0:00:10,", "0:01:10,", "0:02:10,"]


def lines_of(behaviour, rows, **limits):
    """The lines about a run in virtual time, of a source with these limits."""
    console = Console(file=io.StringIO(), width=200)

    async def main(engine):
        async with progress_shown(console, rows, engine):
            await engine.score_all(make_samples(rows))
        return now()

    options = {"limits": {"a": limits}, "total_s": 300.0, "engine": {"scheduling": {"hedge": False}}}
    ended_s = Stage({"a": behaviour}, options=options).run(main)
    return console.file.getvalue().splitlines(), ended_s


def seconds_left(line):
    hours, minutes, seconds = re.search(r"about (\d+):(\d+):(\d+) left", line).groups()
    return 3600 * int(hours) + 60 * int(minutes) + int(seconds)


def strict(name):
    """A source that enforces 60 requests a minute."""
    return SimulatedSource(
        name, behaviour=lambda number, request, now: 0.5, answer=scored_text, model="m", requests_per_window=60
    )


@each_of(
    ("source", "rows", "limits", "spent"),
    [
        (0.5, 90, {"requests_per_minute": 60}, True),
        (0.5, 200, {"requests_per_minute": 60}, True),
        (0.5, 200, {"requests_per_minute": 600, "window_s": 6.0}, True),
        (strict("a"), 90, {}, True),  # it is learned
        (0.5, 200, {"requests_per_minute": 60, "window": "bucket"}, False),
        (0.5, 200, {"concurrency": 1}, False),
    ],
)
def test_the_time_left_knows_that_a_spent_limit_waits_for_its_window(source, rows, limits, spent):
    lines, ended_s = lines_of(source, rows, **limits)
    assert lines[0].endswith("sent, its rate limit is spent") is spent, lines[0]
    for count, line in enumerate(lines):
        assert abs(10 + 60 * count + seconds_left(line) - ended_s) <= 10, line


def test_the_time_left_is_at_most_what_the_deadline_leaves():
    """One row was judged, and the others hang."""
    lines, ended_s = lines_of(lambda number, request, now: 1.0 if number == 0 else NEVER_S, 20, concurrency=8)
    assert ended_s == 300.0
    assert [seconds_left(line) for line in lines] == [190, 230, 170, 110, 50]


def test_a_terminal_of_80_columns_holds_it_all():
    big = {"requests": 1_234_567, "throttled": 12_345, "transient": 99_999, "in_flight": 1000, "latency_p50_s": 0.123}
    big |= {"latency_p95_s": 119.5, "prompt_tokens": 987_654_321, "state": "down", "cost_usd": 123.4567}
    sources = {"a-source-with-a-long-name": big, "b": {"state": "degraded"}}
    lines = watch(shown(sources, scored=1_234_567, failed=3), 12_345_678, for_s=2, terminal=True)
    assert max(map(len, lines)) <= 80
    assert any("1,234,570/12,345,678 (10%) in 0:00:02, about 0:00:1" in line for line in lines)
    row = next(line for line in lines if line.startswith("a-source"))
    assert row.split()[1:] == ["down", "1.2M", "1000", "12.3k", "100.0k", "0.12s", "120s", "987.7M", "123.4567"]
