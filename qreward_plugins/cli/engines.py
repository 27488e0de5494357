"""Opens the engine of a configuration for a command, and shows its progress.

A shell has not joined Ray, so a command does. Progress is a bar and a table of the sources, or plain lines if there is
no terminal. It counts outcomes and not written rows: rows are written in order, so one slow row would stop the bar.
"""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from collections.abc import AsyncIterator, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..config import Config, load_config
from ..engine import RewardEngine
from ..errors import ConfigurationError, InputError, Mistake
from ..observers import EngineStatistics, SourceStatistics
from ..sources.ray_methods import is_ray_method
from ..system.ray_actors import join_cluster
from .console import ERRORS, STYLES, clock, say, seconds, short

_REFRESH_S = 0.5
_FIRST_LINE_S = 10.0
"""Without a terminal, the first line is printed after this time, so that a judge that hangs is noticed."""
_LINE_S = 60.0

_WINDOW_S = 60.0
"""Window of a limit that is not declared."""
_SPENT = 0.9
"""Share of a limit from which it counts as spent: what is left may be too little for the next request."""

_COLUMNS = ("state", "sent", "in flight", "429s", "errors", "p50", "p95", "tokens", "USD")
_WIDTH = 66
"""Width of the table without the names of the sources, in characters."""
_SHORTEST_NAME = 14


def load_own(path: Path) -> Config:
    """Load a configuration with sources of its own.

    Raises `ConfigurationError`, and for a configuration that names a reward server, too.
    """
    config = load_config(path)
    if config.engine.server is not None:
        problem = "this command needs sources and judges, and a reward server has them."
        remedy = "Run it with the file of the server."
        raise ConfigurationError([Mistake("engine.server", problem, remedy)], origin=str(path))
    return config


def open_engine(config: Config, path: Path) -> RewardEngine:
    """Open the engine of a configuration, on the Ray cluster that runs if a source is placed there.

    Errors name `path`, the file of the configuration. Raises `InputError` if a cluster is needed and none runs.
    """
    with mistakes_in(path), ended_by_a_signal():
        join_ray(config, path)
        return RewardEngine(config)


@contextmanager
def mistakes_in(path: Path) -> Iterator[None]:
    """Let the mistakes that are found inside name `path`, the file of the configuration."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(error.mistakes, origin=str(path)) from None


def join_ray(config: Config, path: Path, names: Collection[str] = ()) -> None:
    """Join the Ray cluster that runs if one of the sources `names` (default: all) has its servers or an actor there.

    A user of a shell cannot call `ray.init()`. Raises `InputError` if no cluster can be joined.
    """
    placed = (
        name
        for name, source in config.sources.items()
        if (getattr(source, "placement", "") == "ray" or is_ray_method(str(getattr(source, "function", ""))))
        and (not names or name in names)
    )
    name = next(placed, None)
    if name is None:
        return
    say(ERRORS, f"joining the Ray cluster of source {name!r} (RAY_ADDRESS, or that of this machine) ...")
    try:
        # In the main thread Ray would take the handling of SIGTERM.
        with ThreadPoolExecutor(1, "qreward-ray") as thread:
            thread.submit(join_cluster).result()
    except ConnectionError as error:
        raise InputError(f"{path}: source {name!r} runs on Ray, and {error}") from None


@contextmanager
def ended_by_a_signal() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process at once.

    A user's module that hangs during its import blocks the event loop, which could not handle the signals. Nothing has
    been started yet that would need to clean up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@asynccontextmanager
async def progress_shown(console: Console, total: int, engine: RewardEngine) -> AsyncIterator[None]:
    """Show progress on `console` while the context is open.

    It is drawn in the engine's event loop, so that statistics are never read while they change.
    """
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    # Each row ends by its deadline, and so many are under way at once.
    longest_s = engine.config.engine.deadline_s * math.ceil(total / engine.stream_window)

    def head(statistics: EngineStatistics) -> str:
        done, elapsed_s = _done(statistics), loop.time() - started_at
        left_s = _left_s(statistics, total, elapsed_s, engine.config)
        if left_s is not None and elapsed_s < longest_s:
            left_s = min(left_s, longest_s - elapsed_s)
        return f"{done:,}/{total:,} ({100 * done // total}%) in {clock(elapsed_s)}, about {clock(left_s)} left"

    def drawn() -> Group:
        statistics = engine.statistics()
        line = Table.grid(padding=(0, 1))
        line.add_row(ProgressBar(total=total, completed=_done(statistics), width=24), head(statistics))
        # The short line last: what the terminal echoes of a Ctrl-C must not begin another line, which nobody wipes.
        return Group(source_table(statistics, console.width), line)

    async def refresh() -> None:
        line_at = started_at + _FIRST_LINE_S
        while True:
            await asyncio.sleep(_REFRESH_S)
            if console.is_terminal:
                live.refresh()
            elif loop.time() >= line_at:
                line_at = loop.time() + _LINE_S
                statistics = engine.statistics()
                say(console, "; ".join([head(statistics), *map(_told, statistics.sources.values())]))

    live = Live(console=console, get_renderable=drawn, auto_refresh=False, transient=True)
    if console.is_terminal:
        live.start(refresh=True)
    refreshing = asyncio.create_task(refresh())
    try:
        yield
    finally:
        refreshing.cancel()
        await asyncio.gather(refreshing, return_exceptions=True)
        live.stop()


def _left_s(statistics: EngineStatistics, total: int, elapsed_s: float, config: Config) -> float | None:
    """Seconds until all rows are done, by those that were judged so far; None before the first."""
    done = _done(statistics)
    judged = done - statistics.cached  # rows of the journal say nothing about the speed
    if not judged:
        return None
    sent = [source for source in statistics.sources.values() if source.requests]
    if not statistics.waiting or not all(map(_is_spent, sent)):
        return (total - done) * elapsed_s / judged
    # Nothing more is sent until the window is over. Then as much is sent at once as in each window so far.
    nodes = [config.sources.get(source.name) for source in sent]
    window_s = max((node.limits.window_s for node in nodes if node is not None), default=_WINDOW_S)
    windows = math.ceil(elapsed_s / window_s)
    more = max(1, math.ceil((total - done) * windows / judged))
    return (windows + more - 1) * window_s - elapsed_s


def _is_spent(source: SourceStatistics) -> bool:
    """Whether its limit of requests or tokens per window is spent, or nearly so."""
    return not source.paced and max(source.requests_share or 0.0, source.tokens_share or 0.0) >= _SPENT


def _told(source: SourceStatistics) -> str:
    unanswered = f", {source.in_flight:,} not answered yet" if source.in_flight else ""
    spent = ", its rate limit is spent" if _is_spent(source) else ""
    return f"{source.name} {source.state}, {source.requests:,} sent{unanswered}{spent}"


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
