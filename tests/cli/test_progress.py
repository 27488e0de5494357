"""What a person sees while a run goes on, in a terminal of 80 columns and in a log."""

from __future__ import annotations

import asyncio
import fcntl
import io
import math
import os
import re
import select
import struct
import termios
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from qreward_plugins import EngineStatistics, SourceStatistics
from qreward_plugins.cli.console import clock, seconds, short
from qreward_plugins.cli.progress import ProgressDisplay, source_table
from qreward_plugins.simulation import run
from qreward_plugins.testing import JudgeServer

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def source(name="a-source-with-a-long-name", **counts):
    values = {
        "state": "up", "requests": 0, "answered": 0, "throttled": 0, "transient": 0, "timeouts": 0, "permanent": 0,
        "invalid": 0, "hedges": 0, "cancelled": 0, "in_flight": 0, "peak_in_flight": 0, "latency_p50_s": math.nan,
        "latency_p95_s": math.nan, "prompt_tokens": 0, "completion_tokens": 0, "cost_usd": 0.0,
        "requests_share": None, "tokens_share": None, "paced": False,
    }  # fmt: skip
    return SourceStatistics(name=name, **{**values, **counts})


def statistics(*sources, scored=0, cached=0, failed=0):
    return EngineStatistics(
        submitted=scored,
        scored=scored,
        failed={"infra/deadline": failed} if failed else {},
        cached=cached,
        attempts=scored,
        waiting=0,
        sources={each.name: each for each in sources},
    )


@dataclass
class WindowSource:
    """What a run over one source looks like that takes 60 requests at the start of every minute."""

    total: int
    cached: int = 0
    started_at: float = field(default=0.0)

    def statistics(self):
        minutes = int(asyncio.get_running_loop().time() // 60) + 1
        judged = min(60 * minutes, self.total - self.cached)
        return statistics(source(requests=judged, answered=judged), scored=self.cached + judged, cached=self.cached)


def watch(shown, *, for_s, terminal=False, rate_per_s=1.0):
    """What the display prints in `for_s` seconds of virtual time."""
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=terminal, color_system=None)

    async def main():
        async with ProgressDisplay(console, shown.total, shown.statistics, rate_per_s=rate_per_s):
            await asyncio.sleep(for_s)

    run(main())
    return [line for line in ANSI.sub("\n", console.file.getvalue()).replace("\r", "\n").splitlines() if line.strip()]


def test_a_log_gets_a_line_after_ten_seconds_and_for_every_tenth_and_minute():
    lines = watch(WindowSource(600), for_s=599)
    assert lines[0] == (
        "60/600 (10%) in 0:00:00, about 0:09:00 left; a-source-with-a-long-name up, 60 sent, 60 in the last minute"
    )
    assert len(lines) == 10
    slow = watch(WindowSource(60_000), for_s=601)
    assert [line.split()[0] for line in slow] == [f"{60 * n:,}/60,000" for n in range(1, 11)]


def test_the_time_left_knows_the_limits_and_not_the_journal():
    """A window that is spent at once must not promise an end in seconds, nor must rows that cost nothing."""
    assert "about 0:09:00 left" in watch(WindowSource(600), for_s=30)[0]
    assert "540/1,000 (54%) in 0:00:00, about 0:07:40 left" in watch(WindowSource(1000, cached=480), for_s=1)[0]
    assert "about ? left" in watch(WindowSource(600, cached=600), for_s=1, rate_per_s=math.inf)[0]


def test_a_rate_is_what_was_sent_in_the_last_minute():
    rates = [line.rsplit(", ", 1)[1] for line in watch(WindowSource(600), for_s=599)]
    assert set(rates) == {"60 in the last minute"}


def test_a_terminal_of_80_columns_holds_it_all():
    big = source(
        requests=1_234_567, throttled=12_345, transient=99_999, in_flight=1000, latency_p50_s=0.123,
        latency_p95_s=119.5, prompt_tokens=987_654_321, state="down", cost_usd=123.4567,
    )  # fmt: skip

    class Shown:
        total = 12_345_678

        def statistics(self):
            return statistics(big, source("b", state="degraded"), scored=1_234_567, failed=3)

    lines = watch(Shown(), for_s=2, terminal=True)
    assert max(map(len, lines)) <= 80
    assert any("1,234,570/12,345,678 (10%) in 0:00:0" in line and "left" in line for line in lines)
    header = next(line for line in lines if line.startswith("source"))
    assert header.split() == (
        ["source", "state", "sent", "last", "min", "in", "flight", "429s", "errors", "p50", "p95", "tokens"]
    )
    row = next(line for line in lines if line.startswith("a-source"))
    assert row.split()[1:] == ["down", "1.2M", "1.2M", "1000", "12.3k", "100.0k", "0.12s", "120s", "987.7M"]

    console = Console(file=io.StringIO(), width=80)
    console.print(source_table(Shown().statistics(), 80))
    assert max(map(len, console.file.getvalue().splitlines())) <= 80
    assert "123.4567" in console.file.getvalue()


def test_a_wide_terminal_shows_names_in_full():
    console = Console(file=io.StringIO(), width=120)
    console.print(source_table(statistics(source()), 120))
    assert "a-source-with-a-long-name" in console.file.getvalue()


def test_a_live_run_in_a_terminal(start_cli, write_config, write_rows, row, tmp_path):
    """The whole command at a pseudo-terminal: progress is drawn while answers are kept back, and wiped at the end."""
    calls = []

    def scorer(call):
        calls.append(call)
        if len(calls) == 4:
            server.hold()
        return 1.0

    ours, theirs = os.openpty()
    _set_size(theirs, rows=24, columns=80)
    screen = b""
    try:
        with JudgeServer(scorer) as server:
            config = write_config({"fast": server}, source={"limits": {"concurrency": 2}})
            rows = write_rows([row(n) for n in range(8)])
            environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "NO_COLOR": ""}
            process = start_cli(
                "score", config, rows, "-o", tmp_path / "out.jsonl",
                stdin=theirs, stdout=theirs, stderr=theirs, text=False, env=environment,
            )  # fmt: skip
            os.close(theirs)
            theirs = -1
            while not re.search(rb"[1-3]/8 \(\d+%\) in ", screen) or b"429s" not in screen:
                data = _read(ours)
                assert data, screen
                screen += data
            server.release()
            while data := _read(ours):
                screen += data
            assert process.wait(timeout=30) == 0
    finally:
        os.close(ours)
        if theirs >= 0:
            os.close(theirs)
    text = ANSI.sub("", screen.decode())
    assert "scoring 8 rows of " in text
    assert "8 of 8 rows have a reward, mean reward 1; see " in text
    assert "━" in text
    assert "Traceback" not in text


def _read(terminal: int) -> bytes:
    """What the terminal shows next; nothing once the other end is closed."""
    assert select.select([terminal], [], [], 30)[0], "the terminal shows nothing more"
    try:
        return os.read(terminal, 65_536)
    except OSError:
        return b""


def _set_size(terminal: int, *, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00s"), (0.4242, "0.42s"), (9.996, "10.0s"), (99.96, "100s"), (math.nan, "-"), (None, "-")],
)
def test_seconds(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (9_999, "9999"), (10_000, "10.0k"), (999_949, "999.9k"), (999_950, "1.0M"), (2_500_000_000, "2.5G")],
)
def test_short(value, text):
    assert short(value) == text


def test_clock():
    assert (clock(None), clock(59.6), clock(3_661), clock(100_000)) == ("?", "0:01:00", "1:01:01", "1 day, 3:46:40")


def test_a_log_tells_of_a_judge_that_hangs_after_ten_seconds():
    async def main():
        console = Console(file=io.StringIO(), width=80)
        hangs = statistics(source("a", requests=8, in_flight=8))
        async with ProgressDisplay(console, 20, lambda: hangs, rate_per_s=math.inf):
            await asyncio.sleep(65)
        return console.file.getvalue()

    assert run(main()).splitlines() == [
        "0/20 (0%) in 0:00:10, about ? left; a up, 8 sent, 8 in the last minute, 8 not answered yet"
    ]
