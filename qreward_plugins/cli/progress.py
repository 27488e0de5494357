"""Shows the progress of a run: a bar and a table of the sources, or plain lines if there is no terminal.

It counts outcomes and not written rows: rows are written in order, so one slow row would stop the bar.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..observers import EngineStatistics
from .console import clock, say, seconds, short

_REFRESH_S = 0.5
_FIRST_LINE_S = 10.0
"""Without a terminal, the first line is printed after this time, so that a judge that hangs is noticed."""
_LINE_S = 60.0

_COLUMNS = ("state", "sent", "in flight", "429s", "errors", "p50", "p95", "tokens", "USD")
_WIDTH = 66
"""Width of the table without the names of the sources, in characters."""
_SHORTEST_NAME = 14
STYLES = {"up": "green", "paused": "yellow", "held": "yellow", "down": "yellow", "degraded": "red", "unusable": "red"}


class Shown(Protocol):
    """What is read of an engine."""

    def statistics(self) -> EngineStatistics: ...


class ProgressDisplay:
    """Shows progress on `console` while its context is open.

    It is drawn in the engine's event loop, so that statistics are never read while they change.
    """

    def __init__(self, console: Console, total: int, engine: Shown) -> None:
        self._console = console
        self._total = total
        self._engine = engine
        self._started_at = 0.0
        self._line_at = 0.0
        self._live = Live(console=console, get_renderable=self._render, auto_refresh=False, transient=True)
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ProgressDisplay:
        self._started_at = self._now()
        self._line_at = self._started_at + _FIRST_LINE_S
        if self._console.is_terminal:
            self._live.start(refresh=True)
        self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._console.is_terminal:
            self._live.stop()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            if self._console.is_terminal:
                self._live.refresh()
            elif self._now() >= self._line_at:
                self._line_at = self._now() + _LINE_S
                self._print_line()

    def _print_line(self) -> None:
        statistics = self._engine.statistics()
        sources = "".join(
            f"; {name} {source.state}, {source.requests:,} sent"
            + (f", {source.in_flight:,} not answered yet" if source.in_flight else "")
            for name, source in statistics.sources.items()
        )
        say(self._console, f"{self._head(statistics)}{sources}")

    def _render(self) -> Group:
        statistics = self._engine.statistics()
        head = Table.grid(padding=(0, 1))
        head.add_row(ProgressBar(total=self._total, completed=_done(statistics), width=24), self._head(statistics))
        # The short line last: what the terminal echoes of a Ctrl-C must not begin another line, which nobody wipes.
        return Group(source_table(statistics, self._console.width), head)

    def _head(self, statistics: EngineStatistics) -> str:
        done = _done(statistics)
        share = f"{100 * done // self._total}%"
        elapsed_s = self._now() - self._started_at
        left = clock(self._left_s(statistics, elapsed_s))
        return f"{done:,}/{self._total:,} ({share}) in {clock(elapsed_s)}, about {left} left"

    def _left_s(self, statistics: EngineStatistics, elapsed_s: float) -> float | None:
        """Time left by the speed so far. Rows of the journal say nothing about it."""
        judged = _done(statistics) - statistics.cached
        return (self._total - _done(statistics)) * elapsed_s / judged if judged else None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def source_table(statistics: EngineStatistics, width: int) -> Table:
    """Return the table of the sources, for a console of `width` columns. Errors include invalid replies."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("source", no_wrap=True, max_width=max(_SHORTEST_NAME, width - _WIDTH))
    table.add_column(_COLUMNS[0], no_wrap=True, min_width=7)
    for name in _COLUMNS[1:]:
        table.add_column(name, no_wrap=True, justify="right", min_width=4)
    for source in statistics.sources.values():
        errors = source.transient + source.permanent + source.invalid
        table.add_row(
            source.name,
            Text(source.state, STYLES.get(source.state, "")),
            *map(short, (source.requests, source.in_flight, source.throttled, errors)),
            *map(seconds, (source.latency_p50_s, source.latency_p95_s)),
            short(source.prompt_tokens + source.completion_tokens),
            f"{source.cost_usd:.4f}" if source.cost_usd else "-",
        )
    return table


def _done(statistics: EngineStatistics) -> int:
    return statistics.scored + statistics.failed_total
