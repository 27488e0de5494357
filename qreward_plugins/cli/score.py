"""`qreward score`: scores a file of rollouts, shows progress, and can be resumed.

The journal makes a run resumable: the same command reads recorded verdicts from it, and asks only for the rest, failed
samples included. After a SIGKILL, verdicts of the last 50 ms and requests in flight are lost; any other end records
them. The output of an earlier run is not read, because it may belong to another configuration.
"""

from __future__ import annotations

import functools
import heapq
import random
import shlex
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..config import Config, JournalConfig, load_config
from ..engine import RewardEngine
from ..errors import InputError, JournalError
from ..files import Rollout, check_rollouts, open_writer, partial_path, read_rollouts
from ..judges import compares_siblings
from ..observers import EngineStatistics
from ..observers.batch_report import percentile
from ..samples import SCREENED, Outcome, Sample, Scored
from ..secrets import one_line
from ..sources import kind_of
from ..system.streams import MOST_HELD, Stream
from ..system.threads import taken_in_thread
from .console import ERRORS, OK, OUT, REWARDS_MISSING, Overwrite, number, number_of, run, say, table
from .engines import open_engine, progress_shown, source_table

_BARS = " ▁▂▃▄▅▆▇█"
_DRAWN = 2_000
_MOST_SOURCES = 100
_SAID_CHARS = 160
_WORST = 5
_LARGEST_GROUP = 1_024
_USUAL_GROUP = 8
"""Samples of a group, for the number of groups that are under way at once."""


def command(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration (YAML).")],
    rollouts: Annotated[Path, typer.Argument(metavar="ROLLOUTS", help="Rows to score, .jsonl, .json or .parquet.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", help="File for the rows and their outcomes, .jsonl."),
    ],
    overwrite: Overwrite = False,
) -> int:
    """Score a file of rollouts: the same rows in the same order, with a column `qreward`.

    A row needs the column `response` (or solution_str, completion; or `turns`, a list of messages) and `messages` or
    `prompt`. `ground_truth` (or reward_model.ground_truth) is the reference, `data_source` chooses the judge, `step`
    and `group_id` name the step and the group, and the judge gets the rest as extras.

    Every verdict is stored in the journal of the configuration, or in FILE.journal, and is not paid for again. After a
    kill, the same command continues the run; with --overwrite, rows without a reward are tried again, and a column
    `qreward` of the input is replaced. Functions are called again, unless their source has a `version`. Delete the
    journal to judge all rows again.

    Exit codes: 0 every sample has a reward; 2 the input or the configuration has mistakes; 3 some samples have no
    reward; 130 stopped with Ctrl-C.
    """
    # Read before the event loop runs: a file system that hangs can then be left with Ctrl-C.
    config = load_config(config_path)
    with ERRORS.status(Text(f"reading {rollouts} ...")):
        total = check_rollouts(rollouts, out=out, overwrite=overwrite)
        first = next(read_rollouts(rollouts)).sample
        if compares_siblings(config):
            _check_groups(rollouts, read_rollouts(rollouts))
    if first.ground_truth is None and (others := sorted(first.extras.keys() - {"step", "group_id"})):
        columns = one_line(", ".join(others), _SAID_CHARS)
        remedy = f"if one of its other columns ({columns}) has it, rename that"
        say(ERRORS, f"{rollouts}: the first row has no ground_truth, so its judge sees none; {remedy}")
    if config.engine.server is None:
        config = with_journal(config, config.engine.journal or journal_beside(out))
    plan = Plan(rollouts, out, total, config, config_path, functools.partial(read_rollouts, rollouts))
    return run(score_rollouts(plan))


@dataclass(frozen=True)
class Plan:
    """A run with a checked input: `total` rows of `rollouts`, which `read` yields, and the output file `out`."""

    rollouts: Path
    out: Path
    total: int
    config: Config
    config_path: Path
    read: Callable[[], Iterator[Rollout]]

    @property
    def journal(self) -> str:
        """Where verdicts are recorded, for messages."""
        engine = self.config.engine
        if engine.server is not None:
            return f"the journal of the reward server at {engine.server.url}, if it has one"
        assert engine.journal is not None
        return engine.journal.path


def journal_beside(file: Path) -> JournalConfig:
    """The journal of a command about `file`, for a configuration without one."""
    return JournalConfig(path=str(file.with_name(f"{file.name}.journal")), keep="all")


def with_journal(config: Config, journal: JournalConfig) -> Config:
    """Return `config` with this journal, whose answers are used again."""
    own = {"journal": journal.model_copy(update={"reuse": True})}
    return config.model_copy(update={"engine": config.engine.model_copy(update=own)})


async def score_rollouts(plan: Plan) -> int:
    """Score the rollouts of a plan. Returns 0 if every sample has a reward, otherwise 3.

    If it is cancelled, the rows so far are in the partial file and all verdicts in the journal, and it prints how to
    continue. Raises `ConfigurationError`, `InputError` and `JournalError`.
    """
    tally = _Tally()
    engine = open_engine(plan.config, plan.config_path)
    try:
        await _score(engine, plan, tally)
    except BaseException:
        # The journal knows which verdicts it has recorded only after it is closed.
        statistics, unrecorded = engine.statistics(), await _close(engine)
        if tally.begun:
            say(ERRORS, _how_to_go_on(plan, tally, statistics, unrecorded))
        raise
    statistics, unrecorded = engine.statistics(), await _close(engine)
    if statistics.sources:
        OUT.print(source_table(statistics, OUT.width))
    if tally.rewarded:
        OUT.print(tally.table())
        say(OUT, tally.worst_rows())
    say(OUT, _summary(plan, tally, statistics))
    if plan.config.engine.server is None and tally.worst:
        lowest = shlex.quote(max(tally.worst)[2])
        say(OUT, f"why the lowest got its reward: qreward why {shlex.quote(plan.journal)} --sample {lowest}")
    for line in tally.failures():
        say(ERRORS, line)
    if plan.config.engine.server is None and tally.rewarded < tally.done:
        say(ERRORS, f"why they have no reward: qreward why {shlex.quote(plan.journal)} --failed")
    if unrecorded is not None:
        raise unrecorded
    return REWARDS_MISSING if tally.rewarded < tally.done else OK


async def _score(engine: RewardEngine, plan: Plan, tally: _Tally) -> None:
    with open_writer(plan.out) as write:
        tally.begun = True
        say(ERRORS, f"scoring {number_of(plan.total, 'row')} of {plan.rollouts}; verdicts go to {plan.journal}")
        # The rows are read in a thread, because a file system may hang.
        scored = _scored(engine, taken_in_thread(plan.read()))
        async with progress_shown(ERRORS, plan.total, engine), aclosing(scored) as outcomes:
            async for rollout, outcome in outcomes:
                write(rollout.row, outcome)
                tally.count(rollout.sample, outcome)


async def _scored(
    engine: RewardEngine, rollouts: AsyncIterator[Rollout]
) -> AsyncGenerator[tuple[Rollout, Outcome], None]:
    """Score rollouts, in order; for a judge that compares, those of one group that follow each other as a batch."""
    if not compares_siblings(engine.config):
        single = Stream(rollouts, lambda rollout: engine.score(rollout.sample), engine.stream_window)
        async with aclosing(single.outcomes()) as scored:
            async for pair in scored:
                yield pair
        return
    window = max(1, engine.stream_window // _USUAL_GROUP)
    held = MOST_HELD // _USUAL_GROUP
    groups = Stream(_groups(rollouts), lambda group: engine.score_all([one.sample for one in group]), window, held=held)
    async with aclosing(groups.outcomes()) as scored_groups:
        async for group, outcomes in scored_groups:
            for pair in zip(group, outcomes, strict=True):
                yield pair


async def _groups(rollouts: AsyncIterator[Rollout]) -> AsyncGenerator[list[Rollout], None]:
    group: list[Rollout] = []
    async for rollout in rollouts:
        sample = rollout.sample
        if group and (sample.group_id is None or _group_of(sample) != _group_of(group[0].sample)):
            yield group
            group = []
        group.append(rollout)
    if group:
        yield group


def _group_of(sample: Sample) -> tuple[str | None, int | None]:
    return sample.group_id, sample.step


def _check_groups(path: Path, rollouts: Iterator[Rollout]) -> None:
    """Raise `InputError` for a group that other rows interrupt, and for a huge one: no judge could compare it."""
    last, size, ended = None, 0, set[Any]()
    for row, rollout in enumerate(rollouts, start=1):
        group = _group_of(rollout.sample)
        if group != last:
            ended.add(last)
            last, size = group, 0
        size += 1
        if group[0] is None:
            continue
        where = f"{path}, row {row}: the group {group[0]!r}"
        if group in ended:
            raise InputError(f"{where} goes on behind rows of other groups; sort the rows by group_id (and step)")
        if size > _LARGEST_GROUP:
            raise InputError(f"{where} has more than {_LARGEST_GROUP:,} rows; does group_id name the prompt?")


async def _close(engine: RewardEngine) -> JournalError | None:
    """Close the engine; return the error of the journal if it could not record all verdicts."""
    try:
        await engine.aclose()
    except JournalError as error:
        return error
    return None


@dataclass
class _Rewards:
    """The rewards of one data source. Quantiles are those of up to `_DRAWN` rewards, drawn evenly."""

    rows: int = 0
    failed: int = 0
    total: float = 0.0
    drawn: list[float] = field(default_factory=list)
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, reward: float | None) -> None:
        self.rows += 1
        if reward is None:
            self.failed += 1
            return
        self.total += reward
        if len(self.drawn) < _DRAWN:
            self.drawn.append(reward)
        elif (place := self._rng.randrange(self.rows - self.failed)) < _DRAWN:
            self.drawn[place] = reward  # Vitter's algorithm R

    def cells(self) -> Iterator[str]:
        yield f"{self.rows:,}"
        yield f"{self.failed:,}"
        scored = self.rows - self.failed
        yield number(self.total / scored if scored else None)
        yield from (number(percentile(self.drawn, share) if scored else None) for share in (0.1, 0.5, 0.9))

    def bars(self, lowest: float, highest: float) -> str:
        """A bar for each twentieth of the range of all rewards."""
        counts = [0] * 20
        for reward in self.drawn:
            share = (reward - lowest) / (highest - lowest) if highest > lowest else 0.0
            counts[min(19, int(20 * share))] += 1
        return "".join(_BARS[-(-(len(_BARS) - 1) * count // max(1, *counts))] for count in counts)


@dataclass
class _Tally:
    """Counts outcomes. It does not keep them, because the file may be larger than the memory."""

    begun: bool = False
    """Whether OUT is open. Before that, there is no run to continue."""
    done: int = 0
    rewarded: int = 0
    total_reward: float = 0.0
    by_source: dict[str, _Rewards] = field(default_factory=dict)
    """The rewards of each data source, of the first `_MOST_SOURCES`."""
    worst: list[tuple[float, int, str, str]] = field(default_factory=list)
    """Of the rows with the lowest rewards: the reward, negated, the number, negated, its id, and what was said."""
    reasons: Counter[tuple[str, bool]] = field(default_factory=Counter)
    examples: dict[tuple[str, bool], str] = field(default_factory=dict)

    def count(self, sample: Sample, outcome: Outcome) -> None:
        self.done += 1
        if sample.data_source in self.by_source or len(self.by_source) < _MOST_SOURCES:
            self.by_source.setdefault(sample.data_source, _Rewards()).add(outcome.reward)
        if isinstance(outcome, Scored):
            self.rewarded += 1
            self.total_reward += outcome.reward
            said = outcome.failure.describe() if outcome.failure is not None else outcome.verdict.rationale
            entry = -outcome.reward, -self.done, sample.id or "", said[:_SAID_CHARS]
            (heapq.heappush if len(self.worst) < _WORST else heapq.heappushpop)(self.worst, entry)
        failed = outcome.failure
        if failed is not None:
            reason = failed.label, outcome.reward is None
            self.reasons[reason] += 1
            self.examples.setdefault(reason, failed.detail)

    def table(self) -> Table:
        """The rewards by data source."""
        columns = ("data source", "rows", "no reward", "mean", "p10", "p50", "p90", "from lowest to highest")
        shown = table(*columns, left=columns[-1:], folds=columns[:1])
        lowest = min((min(each.drawn) for each in self.by_source.values() if each.drawn), default=0.0)
        highest = max((max(each.drawn) for each in self.by_source.values() if each.drawn), default=1.0)
        for name, each in sorted(self.by_source.items(), key=lambda item: -item[1].rows):
            shown.add_row(Text(one_line(name or "(none)", 40)), *each.cells(), each.bars(lowest, highest))
        return shown

    def worst_rows(self) -> Text:
        """The rows with the lowest rewards, with what was said of them."""
        shown = Text("lowest:")
        for reward, row, name, said in sorted(self.worst, reverse=True):
            words = one_line("; ".join(said.splitlines()), _SAID_CHARS)
            shown.append(f"\n  {-reward:.4g}  {one_line(name or f'row {-row}', 40)}  {words}")
        return shown

    def failures(self) -> Iterator[Text]:
        """Yield one line for each reason, with its first example; reasons for a missing reward come first."""
        for (reason, missing), count in sorted(self.reasons.items(), key=lambda item: (not item[0][1], -item[1])):
            what = f"{count:,} without a reward" if missing else f"{count:,} scored at the floor"
            style = "red" if missing and reason != SCREENED else ""
            example = "e.g. " if count > 1 else ""
            yield Text(what, style) + Text(f" ({reason}): {example}{self.examples[reason, missing]}")


def _summary(plan: Plan, tally: _Tally, statistics: EngineStatistics) -> str:
    cached = f" ({statistics.cached:,} of them from the journal)" if statistics.cached else ""
    mean = f", mean reward {tally.total_reward / tally.rewarded:.4g}" if tally.rewarded else ""
    cost = sum(source.cost_usd for source in statistics.sources.values())
    priced = f", {cost:.4f} USD" if cost else ""
    have = "has" if plan.total == 1 else "have"
    return f"{tally.rewarded:,} of {number_of(plan.total, 'row')} {have} a reward{cached}{mean}{priced}; see {plan.out}"


def _how_to_go_on(plan: Plan, tally: _Tally, statistics: EngineStatistics, unrecorded: JournalError | None) -> str:
    recorded = "all" if unrecorded is None else "not all"
    again = "no verdict is paid for twice" if unrecorded is None else str(unrecorded)
    uncertain = [name for name, node in plan.config.sources.items() if not kind_of(node).reusable(node)]
    called = f"; sources without a version ({', '.join(uncertain)}) are asked again" if uncertain else ""
    return (
        f"stopped after {statistics.scored + statistics.failed_total:,} of {number_of(plan.total, 'row')}\n"
        f"  rows so far: the first {tally.done:,}, in {partial_path(plan.out)}\n"
        f"  verdicts so far: {recorded}, in {plan.journal}\n"
        f"Run the same command again to go on; {again}{called}."
    )
