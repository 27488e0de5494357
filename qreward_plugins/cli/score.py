"""`qreward score`: a file of rollouts through the engine, with a progress bar, and resumable.

What makes a run resumable is the journal beside the output: every verdict is in it before its row is written, so the
same command reads what was paid for and asks only for the rest, failed samples included.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..config import Config, load_config
from ..config.models import JournalConfig
from ..engine import RewardEngine
from ..errors import InputError
from ..files import open_writer, partial_path, read_rows, to_sample
from ..samples import Failed, Outcome, Sample
from ..telemetry import EngineStatistics

_REFRESH_S = 0.25
_LINES_EVERY = 0.1
"""Without a terminal, one line of progress for every such share of the samples."""


async def score_file(rollouts: Path, config_path: Path, out: Path, console: Console, errors: Console) -> int:
    """Score `rollouts` to `out`; 0 when every sample has a reward, 3 when some have none.

    Raises `InputError` and `ConfigurationError` before the first request. Ctrl-C leaves the rows so far in the partial
    file and every verdict in the journal.
    """
    config = _with_journal(load_config(config_path), out)
    total = _checked(rollouts)
    tally = _Tally()
    pairs = _Pairs(rollouts)
    async with RewardEngine(config) as engine:
        with open_writer(out, source=rollouts) as writer:
            try:
                async with _Display(console, total, tally, engine.statistics):
                    async for sample, outcome in engine.score_stream(pairs):
                        writer.write(pairs.row_of(sample), outcome)
                        tally.count(outcome)
            except BaseException:
                errors.print(
                    f"stopped after {tally.done} of {total} rows; they are in {partial_path(out)}. "
                    "Run the same command again to go on.",
                    highlight=False,
                    soft_wrap=True,
                )
                raise
        statistics = engine.statistics()
    console.print(_source_table(statistics))
    mean = f"mean reward {tally.total_reward / tally.rewarded:.4g}" if tally.rewarded else "no rewards"
    cached = f", {statistics.cached} of them from an earlier run" if statistics.cached else ""
    cost = sum(source.cost_usd for source in statistics.sources.values())
    priced = f", {cost:.4f} USD" if cost else ""
    console.print(
        f"{tally.rewarded} of {total} samples have a reward{cached}; {mean}{priced}. Written to {out}", soft_wrap=True
    )
    for reason, count in tally.failures.most_common():
        errors.print(f"[red]{count} failed[/red] ({escape(reason)}): {escape(tally.examples[reason])}", highlight=False)
    return 3 if tally.failures else 0


@dataclass
class _Tally:
    """What came out so far, in numbers: the file may be longer than memory."""

    done: int = 0
    rewarded: int = 0
    total_reward: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def count(self, outcome: Outcome) -> None:
        self.done += 1
        if outcome.reward is not None:
            self.rewarded += 1
            self.total_reward += outcome.reward
        if isinstance(outcome, Failed):
            floored = "" if outcome.reward is None else ", scored at the floor"
            reason = f"{outcome.cause.value}/{outcome.reason}{floored}"
            self.failures[reason] += 1
            self.examples.setdefault(reason, outcome.detail)


class _Pairs:
    """Hands out the samples of a file one by one and remembers each one's row until it is written.

    The engine yields outcomes in the order in which it took the samples, so a queue would do; the row is kept by the
    sample's identity all the same, because a wrong pairing here would be a silent disaster.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[int, dict[str, Any]] = {}

    def __iter__(self) -> Iterator[Sample]:
        for number, row in enumerate(read_rows(self._path), start=1):
            sample = to_sample(row, f"row {number}")
            self._rows[id(sample)] = row
            yield sample

    def row_of(self, sample: Sample) -> dict[str, Any]:
        """The row of a sample that is still alive; it is forgotten with this call."""
        return self._rows.pop(id(sample))


class _Display:
    """A progress bar with the sources' rates below it, or plain lines where nobody watches a terminal.

    It is drawn from the engine's own event loop, so that statistics are never read while they change.
    """

    def __init__(self, console: Console, total: int, tally: _Tally, statistics: Callable[[], EngineStatistics]) -> None:
        self._console = console
        self._total = total
        self._tally = tally
        self._statistics = statistics
        self._printed = 0
        self._progress = Progress(
            TextColumn("scoring"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task_id = self._progress.add_task("scoring", total=total)
        self._live = Live(get_renderable=self._render, console=console, auto_refresh=False, transient=True)
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Display:
        if self._console.is_terminal:
            self._live.start()
        self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._ticker is not None
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        if self._console.is_terminal:
            self._live.stop()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            if self._console.is_terminal:
                self._live.refresh()
            elif self._tally.done >= self._printed + max(1, round(_LINES_EVERY * self._total)):
                self._printed = self._tally.done
                self._console.print(f"{self._printed}/{self._total} rows", highlight=False)

    def _render(self) -> Group:
        self._progress.update(self._task_id, completed=self._tally.done)
        elapsed_s = self._progress.tasks[0].elapsed
        return Group(self._progress, _source_table(self._statistics(), elapsed_s))


def _source_table(statistics: EngineStatistics, elapsed_s: float | None = None) -> Table:
    table = Table(
        "source", "state", "requests", "per minute", "in flight", "429s", "errors", "invalid", "p50", "p95", "tokens"
    )
    for source in statistics.sources.values():
        rate = f"{60 * source.requests / elapsed_s:.0f}" if elapsed_s else "-"
        table.add_row(
            source.name,
            source.state,
            str(source.requests),
            rate,
            str(source.in_flight),
            str(source.throttled),
            str(source.transient + source.permanent),
            str(source.invalid),
            _seconds(source.latency_p50_s),
            _seconds(source.latency_p95_s),
            f"{source.prompt_tokens + source.completion_tokens:,}",
        )
    return table


def _seconds(value: float) -> str:
    return "-" if value != value else f"{value:.2f} s"


def _with_journal(config: Config, out: Path) -> Config:
    journal = config.engine.journal or JournalConfig(path=str(out.with_name(out.name + ".journal")))
    engine = config.engine.model_copy(update={"journal": journal.model_copy(update={"reuse": True})})
    return config.model_copy(update={"engine": engine})


def _checked(rollouts: Path) -> int:
    total = 0
    for total, row in enumerate(read_rows(rollouts), start=1):
        to_sample(row, f"{rollouts}, row {total}")
    if not total:
        raise InputError(f"{rollouts}: has no rows")
    return total
