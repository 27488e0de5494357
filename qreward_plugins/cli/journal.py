"""`qreward journal`: what the judges said, and which sample each step waited for.

A row of the journal is the outcome of one judge for one sample. A judge that asks others has one beside those of its
parts. Journals are read, never changed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean, median
from typing import Annotated, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from ..journal.database import rows_of
from ..journal.stories import journals_in
from ..samples import SCREENED
from ..secrets import one_line
from .console import OK, OUT, Journals, number_of, print_whole, say, seconds, short, table

LATEST = 200_000
"""Only this many rows of a journal are read, the latest ones."""
_SEED = 0
_WIDEST_NAME = 16
_WIDEST_CHARS = 20_000
_LEFT = ("run", "sample", "step", "judge", "source")


class _Row(NamedTuple):
    """The outcome of one judge for one sample, as `_SELECT` reads it after the number of its journal.

    `label` is the step and, unless it is of the training, the split. `reward` is the score, or the floor that stands
    for it; `failed`: there is none, and no monitor took the sample out. `waited_s` are the seconds before the last
    attempt: in the queue, for a limit, or in attempts that failed; it and `service_s` are None if unknown.
    """

    journal: int
    id: int
    run_id: str
    sample: str
    step: int
    label: str
    judge: str
    source: str
    reward: float | None
    floor: float | None
    failed: bool
    latency_s: float
    waited_s: float | None
    service_s: float | None
    attempts: int
    tokens: int
    cost_usd: float
    cached: bool
    said: str


_SELECT = f"""
SELECT * FROM (
    SELECT id, run_id, coalesce(sample_id, '-'), coalesce(step, 0),
        coalesce(step, '-') || CASE WHEN coalesce(split, '') IN ('', 'train') THEN '' ELSE ' ' || split END,
        judge, source, coalesce(score, floor), floor,
        coalesce(score, floor) IS NULL AND cause || '/' || reason IS NOT ?, latency_s, max(0.0, latency_s - service_s),
        service_s, attempts, prompt_tokens + completion_tokens, cost_usd, cached,
        coalesce(nullif(detail, ''), nullif(rationale, ''), '-')
    FROM outcomes WHERE ? IS NULL OR step = ? ORDER BY id DESC LIMIT ?
) ORDER BY {_Row._fields.index("id")}
"""


def command(
    paths: Journals,
    step: Annotated[int | None, typer.Option(metavar="N", help="Only this training step, the slowest first.")] = None,
    last: Annotated[int, typer.Option(metavar="N", min=1, help="How many of the latest steps are shown.")] = 10,
    verdicts: Annotated[int, typer.Option(metavar="N", min=0, help="How many verdicts are shown.")] = 8,
) -> int:
    """Show what a journal recorded, also while a run writes it.

    For each step: how many outcomes and failures, the mean score, and the slowest sample, how long it waited and on
    which source. For each source: answers, retries, time, tokens and cost. Then some verdicts, with the words of the
    judge.

    Exit codes: 0 shown; 2 there is no such journal, or nothing in it.
    """
    names, rows = " and ".join(paths), list[_Row]()
    if step is None or -(2**63) <= step < 2**63:  # SQLite has no other integers
        rows = [_Row(*row) for row in rows_of(journals_in(paths), _SELECT, (SCREENED, step, step, LATEST))]
    if not rows:
        raise InputError(f"{names} has no outcomes" + ("" if step is None else f" of step {step}"))
    latest = "the latest " if len(rows) >= LATEST else ""
    failed, floors = sum(row.failed for row in rows), sum(row.floor is not None for row in rows)
    runs = list(dict.fromkeys(row.run_id for row in rows))
    of_runs = f" of {len(runs)} runs" if len(runs) > 1 else ""
    floor = f", {floors:,} got a floor" if floors else ""
    say(OUT, f"{names}: {latest}{number_of(len(rows), 'outcome')}{of_runs}, {failed:,} of them failed{floor}\n")
    print_whole(OUT, _steps(rows, runs, last))
    OUT.print()
    print_whole(OUT, _sources(rows))
    if verdicts:
        title = "drawn from all" if step is None else "the slowest of the step first"
        OUT.print()
        print_whole(OUT, _verdicts(_picked(rows, verdicts, step), f"verdicts, {title}"), widest=80)
        say(OUT, "\nqreward why FILE --row N: the whole story of a row")
    say(OUT, "\nwaited: in the queue, for a limit, or in tries that failed; the rest is the time of the answer itself")
    return OK


def _steps(rows: Sequence[_Row], runs: Sequence[str], most: int) -> Table:
    """The latest steps: the runs in the order in which they began, and each by its steps. A resumed run repeats the
    step in which the earlier one ended, and each has its own row of it.
    """
    groups: dict[tuple[str, str, str], list[_Row]] = {}
    for row in rows:
        groups.setdefault((row.run_id, row.label, row.judge), []).append(row)
    # Rows of several files and of steps that overlap are mixed.
    found = sorted(groups.values(), key=lambda group: (runs.index(group[0].run_id), group[0].step))
    shown, by_run = found[-most:], len(runs) > 1
    which = f", the last {len(shown)} of {len(found)}" if len(shown) < len(found) else ""
    columns = ("step", "judge", "n", "failed", "score", "median", "slowest", "waited", "tries", "source")
    steps = table(
        *(("run",) if by_run else ()), *columns, left=_LEFT, title=f"steps, and the slowest sample of each{which}"
    )
    for group in shown:
        slowest, failed = max(group, key=lambda row: row.latency_s), sum(row.failed for row in group)
        rewards = [row.reward for row in group if row.reward is not None]
        steps.add_row(
            *([_name(slowest.run_id)] if by_run else []),
            *(_name(slowest.label), _name(slowest.judge), str(len(group)), Text(str(failed), "red" if failed else "")),
            *(_score(fmean(rewards) if rewards else None), seconds(median(row.latency_s for row in group))),
            *(seconds(slowest.latency_s), seconds(slowest.waited_s), str(slowest.attempts), _name(slowest.source)),
        )
    return steps


def _sources(rows: Sequence[_Row]) -> Table:
    """The sources that answered, the busiest first. Times are of the answered attempts alone."""
    groups: dict[str, list[_Row]] = {}
    for row in rows:
        if row.source:
            groups.setdefault(row.source, []).append(row)
    columns = ("source", "n", "from journal", "retries", "median", "slowest", "tokens", "USD")
    shown = table(*columns, left=_LEFT, title="sources")
    for source, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        times = [row.service_s for row in group if row.service_s and not row.cached]
        retries = sum(max(0, row.attempts - 1) for row in group)
        cost = sum(row.cost_usd for row in group)
        shown.add_row(
            *(_name(source), str(len(group)), str(sum(row.cached for row in group)), str(retries)),
            *(seconds(median(times) if times else None), seconds(max(times, default=None))),
            *(short(sum(row.tokens for row in group)), f"{cost:.4f}" if cost else "-"),
        )
    return shown


def _picked(rows: Sequence[_Row], count: int, step: int | None) -> list[_Row]:
    """The rows of a step that took longest; of all steps, rows that are drawn, the same at every call."""
    if step is not None:
        return sorted(rows, key=lambda row: -row.latency_s)[:count]
    places = random.Random(_SEED).sample(range(len(rows)), min(count, len(rows)))
    return [rows[place] for place in sorted(places)]


def _verdicts(rows: Sequence[_Row], title: str) -> Table:
    columns = ("row", "sample", "step", "judge", "score", "took", "what it said")
    shown = table(*columns, left=_LEFT, folds=columns[-1:], title=title)
    for row in rows:
        # Control characters are escaped: a judge may repeat those of a response, and a terminal would obey them.
        said = "\n".join(one_line(line, _WIDEST_CHARS) for line in row.said.splitlines())
        names = map(_name, (row.sample, row.label, row.judge))
        taken = (_score(row.reward), seconds(row.latency_s))
        shown.add_row(str(row.id), *names, *taken, Text(said, "red" if row.failed else ""))
    return shown


def _name(text: str) -> Text:
    return Text(one_line(text if len(text) <= _WIDEST_NAME else text[: _WIDEST_NAME - 3] + "...", _WIDEST_CHARS))


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
