"""What a person sees while a run goes on, in a terminal of 80 columns and in a log."""

from __future__ import annotations

import asyncio
import io
import math
import re
from dataclasses import fields

from rich.console import Console

from qreward_plugins import EngineStatistics, SourceStatistics
from qreward_plugins.cli.progress import progress_shown
from qreward_plugins.simulation import run

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def source(name="a-source-with-a-long-name", **counts):
    values = dict.fromkeys((field.name for field in fields(SourceStatistics)), 0)
    values |= {"name": name, "state": "up", "latency_p50_s": math.nan, "latency_p95_s": math.nan}
    return SourceStatistics(**{**values, **counts})


class Shown:
    """What is shown of an engine whose sources have these statistics."""

    def __init__(self, *sources, scored=0, failed=0):
        self.sources, self.scored, self.failed = sources, scored, failed

    def statistics(self):
        return EngineStatistics(
            submitted=self.scored,
            scored=self.scored,
            failed={"infra/deadline": self.failed} if self.failed else {},
            cached=0,
            attempts=self.scored,
            waiting=0,
            sources={each.name: each for each in self.sources},
        )


def watch(shown, total, *, for_s, terminal=False):
    """What the display prints in `for_s` seconds of virtual time."""
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=terminal, color_system=None)

    async def main():
        async with progress_shown(console, total, shown):
            await asyncio.sleep(for_s)

    run(main())
    return [line for line in ANSI.sub("\n", console.file.getvalue()).replace("\r", "\n").splitlines() if line.strip()]


def test_a_log_gets_a_line_after_ten_seconds_and_for_every_minute():
    hangs = Shown(source("a", requests=8, in_flight=8))
    lines = watch(hangs, 20, for_s=135)
    assert lines[0] == "0/20 (0%) in 0:00:10, about ? left; a up, 8 sent, 8 not answered yet"
    assert [line.split()[3] for line in lines] == ["0:00:10,", "0:01:10,", "0:02:10,"]


def test_a_terminal_of_80_columns_holds_it_all():
    big = source(
        requests=1_234_567, throttled=12_345, transient=99_999, in_flight=1000, latency_p50_s=0.123,
        latency_p95_s=119.5, prompt_tokens=987_654_321, state="down", cost_usd=123.4567,
    )  # fmt: skip
    shown = Shown(big, source("b", state="degraded"), scored=1_234_567, failed=3)
    lines = watch(shown, 12_345_678, for_s=2, terminal=True)
    assert max(map(len, lines)) <= 80
    assert any("1,234,570/12,345,678 (10%) in 0:00:02, about 0:00:1" in line for line in lines)
    row = next(line for line in lines if line.startswith("a-source"))
    assert row.split()[1:] == ["down", "1.2M", "1000", "12.3k", "100.0k", "0.12s", "120s", "987.7M", "123.4567"]
