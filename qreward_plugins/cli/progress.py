"""Shows the progress of a run: a bar and a table of the sources, or plain lines if there is no terminal.

It counts outcomes and not written rows: rows are written in order, so one slow row would stop the bar. The rate of a
source is the number of requests sent in the last minute, because its limit is per minute. An average over the run would
look like a broken limit in the first seconds, when a window is spent at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..observers import EngineStatistics, SourceStatistics
from .figures import clock, seconds, short
from .running import say

_REFRESH_S = 0.5
_MINUTE_S = 60.0
_LINES_EVERY = 0.1
"""Without a terminal, a line is printed after every such share of the samples, and every minute."""
_FIRST_LINE_S = 10.0
"""The first line is printed after this many seconds at the latest, so that a judge that hangs is noticed."""

_LIVE_COLUMNS = ("state", "sent", "last min", "in flight", "429s", "errors", "p50", "p95", "tokens")
_FINAL_COLUMNS = ("state", "sent", "429s", "errors", "invalid", "p50", "p95", "tokens", "USD")
_WIDTH = 66
"""Width of either table without the names of the sources, in characters."""
_SHORTEST_NAME = 14


class ProgressDisplay:
    """Shows progress on `console` while its context is open.

    It is drawn in the engine's event loop, so that statistics are never read while they change. `rate_per_s` is the
    number of requests per second that the limits allow; infinity without limits.
    """

    def __init__(
        self, console: Console, total: int, statistics: Callable[[], EngineStatistics], *, rate_per_s: float
    ) -> None:
        self._console = console
        self._total = total
        self._statistics = statistics
        self._rate_per_s = rate_per_s
        self._started_at = 0.0
        self._sent: deque[tuple[float, dict[str, int]]] = deque()
        self._printed_done = 0
        self._printed_at = 0.0
        self._live = Live(console=console, get_renderable=self._render, auto_refresh=False, transient=True)
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ProgressDisplay:
        self._started_at = self._printed_at = self._now()
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
            else:
                self._print_line()

    def _print_line(self) -> None:
        statistics, now = self._statistics(), self._now()
        last_minute = self._last_minute(statistics, now)
        done = _done(statistics)
        wait_s = _FIRST_LINE_S if self._printed_at == self._started_at else _MINUTE_S
        if done < self._printed_done + _LINES_EVERY * self._total and now < self._printed_at + wait_s:
            return
        self._printed_done, self._printed_at = done, now
        sources = "".join(
            f"; {name} {source.state}, {source.requests:,} sent, {last_minute[name]:,} in the last minute"
            + (f", {source.in_flight:,} not answered yet" if source.in_flight else "")
            for name, source in statistics.sources.items()
        )
        say(self._console, f"{self._head(statistics, now)}{sources}")

    def _render(self) -> Group:
        statistics, now = self._statistics(), self._now()
        last_minute = self._last_minute(statistics, now)
        head = Table.grid(padding=(0, 1))
        head.add_row(ProgressBar(total=self._total, completed=_done(statistics), width=24), self._head(statistics, now))
        table = _table(_LIVE_COLUMNS, self._console.width)
        for source in statistics.sources.values():
            cells = _cells(source)
            errors = source.transient + source.permanent + source.invalid
            cells |= {"last min": short(last_minute[source.name]), "errors": short(errors)}
            table.add_row(source.name, *(cells[name] for name in _LIVE_COLUMNS))
        # The short line last: what the terminal echoes of a Ctrl-C must not begin another line, which nobody wipes.
        return Group(table, head)

    def _head(self, statistics: EngineStatistics, now: float) -> str:
        done = _done(statistics)
        share = f"{100 * done // self._total}%"
        elapsed_s = now - self._started_at
        left = clock(self._left_s(statistics, elapsed_s))
        return f"{done:,}/{self._total:,} ({share}) in {clock(elapsed_s)}, about {left} left"

    def _left_s(self, statistics: EngineStatistics, elapsed_s: float) -> float | None:
        """Time left, by the speed so far and by what the limits allow. Rows of the journal say nothing about either."""
        left, judged = self._total - _done(statistics), _done(statistics) - statistics.cached
        if not judged or not elapsed_s:
            return None
        return max(left * elapsed_s / judged, left / self._rate_per_s)

    def _last_minute(self, statistics: EngineStatistics, now: float) -> dict[str, int]:
        sent = {name: source.requests for name, source in statistics.sources.items()}
        self._sent.append((now, sent))
        while len(self._sent) > 1 and self._sent[1][0] <= now - _MINUTE_S:
            self._sent.popleft()
        at, before = self._sent[0]
        return {name: count - (before[name] if at <= now - _MINUTE_S else 0) for name, count in sent.items()}

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def source_table(statistics: EngineStatistics, width: int) -> Table:
    """Return the table of the sources after a run, for a console of `width` columns."""
    table = _table(_FINAL_COLUMNS, width)
    for source in statistics.sources.values():
        cells = _cells(source)
        table.add_row(source.name, *(cells[name] for name in _FINAL_COLUMNS))
    return table


def _cells(source: SourceStatistics) -> dict[str, str | Text]:
    """The cells of a source, by the names of their columns."""
    return {
        "state": Text(source.state, _STYLES.get(source.state, "")),
        "sent": short(source.requests),
        "in flight": short(source.in_flight),
        "429s": short(source.throttled),
        "errors": short(source.transient + source.permanent),
        "invalid": short(source.invalid),
        "p50": seconds(source.latency_p50_s),
        "p95": seconds(source.latency_p95_s),
        "tokens": short(source.prompt_tokens + source.completion_tokens),
        "USD": f"{source.cost_usd:.4f}" if source.cost_usd else "-",
    }


def _table(columns: tuple[str, ...], width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("source", no_wrap=True, max_width=max(_SHORTEST_NAME, width - _WIDTH))
    table.add_column(columns[0], no_wrap=True, min_width=7)
    for name in columns[1:]:
        table.add_column(name, no_wrap=True, justify="right", min_width=5)
    return table


def _done(statistics: EngineStatistics) -> int:
    return statistics.scored + statistics.failed_total


_STYLES = {"up": "green", "paused": "yellow", "held": "yellow", "down": "yellow", "degraded": "red", "unusable": "red"}
