"""`qreward journal`: what each step came to, which sample it waited for, and what the sources did.

A row of the journal is the outcome of one judge for one sample. A judge that asks others has one beside those of its
parts. Journals are read, never changed.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeAlias

import typer
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from ..journal.database import rows_of
from ..journal.stories import journals_in
from ..samples import SCREENED
from ..secrets import one_line
from .console import OK, OUT, Journals, number, number_of, print_whole, say, seconds, short, table

_WIDEST_NAME = 16
_NAME_CHARS = 200
_LEFT = ("run", "step", "judge", "sample", "source")

_Place: TypeAlias = tuple[str, int, str, str]
"""A run, a step, its split, and a judge."""


class _Part(NamedTuple):
    """What one journal has of a place, as `_STEPS` reads it after the number of the journal and the place.

    `latency_s` and what follows are those of the slowest sample. `service_s` is the time of the answer itself, None if
    there is none; the rest was spent in the queue, for a limit, or in attempts that failed.
    """

    began_at: float
    outcomes: int
    failed: int
    floors: int
    rewarded: int
    rewards: float | None
    latency_s: float
    service_s: float | None
    attempts: int
    source: str
    sample: str


_Steps: TypeAlias = Mapping[_Place, Sequence[_Part]]

# SQLite takes the columns of the slowest sample from the row with the maximum.
_STEPS = """
SELECT run_id, coalesce(step, -1), CASE coalesce(split, 'train') WHEN 'train' THEN '' ELSE split END, judge,
    min(recorded_at), count(*), sum(coalesce(score, floor) IS NULL AND cause || '/' || reason IS NOT ?),
    count(floor), count(coalesce(score, floor)), sum(coalesce(score, floor)),
    max(latency_s), service_s, attempts, source, coalesce(sample_id, '-')
FROM outcomes GROUP BY 1, 2, 3, 4
"""
_SOURCES = """
SELECT source, count(*), sum(cached), sum(max(0, attempts - 1)), count(service_s), total(service_s),
    sum(prompt_tokens + completion_tokens), sum(cost_usd)
FROM outcomes WHERE source != '' GROUP BY 1
"""


def command(
    paths: Journals,
    last: Annotated[int, typer.Option(metavar="N", min=1, help="How many of the latest steps are shown.")] = 10,
) -> int:
    """Show what a journal recorded, also while a run writes it.

    For each step: how many outcomes and failures, the mean score, and the slowest sample, how long it waited and on
    which source. For each source: answers, retries, time, tokens and cost. `qreward why` has what the judges said.

    Exit codes: 0 shown; 2 there is no such journal, or nothing in it.
    """
    names, files = " and ".join(paths), journals_in(paths)
    steps: dict[_Place, list[_Part]] = defaultdict(list)
    for _, run, step, split, judge, *part in rows_of(files, _STEPS, (SCREENED,)):
        steps[run, step, split, judge].append(_Part(*part))
    parts = [part for of_place in steps.values() for part in of_place]
    if not parts:
        raise InputError(f"{names} has no outcomes")
    runs = sorted({run for run, *_ in steps}, key=lambda run: min(_began(run, steps)))
    of_runs = f" of {len(runs)} runs" if len(runs) > 1 else ""
    floors = sum(part.floors for part in parts)
    floor = f", {floors:,} got a floor" if floors else ""
    count, failed = number_of(sum(part.outcomes for part in parts), "outcome"), sum(part.failed for part in parts)
    say(OUT, f"{names}: {count}{of_runs}, {failed:,} of them failed{floor}\n")
    print_whole(OUT, _step_table(steps, runs, last))
    OUT.print()
    print_whole(OUT, _source_table(files))
    say(OUT, "\nwaited: in the queue, for a limit, or in tries that failed; the rest is the time of the answer itself")
    say(OUT, f"the whole story of a sample: qreward why {shlex.join(paths)} --sample ID")
    return OK


def _began(run: str, steps: _Steps) -> Iterator[float]:
    return (part.began_at for place, parts in steps.items() if place[0] == run for part in parts)


def _step_table(steps: _Steps, runs: Sequence[str], most: int) -> Table:
    """The latest steps: the runs in the order in which they began, and each by its steps. A resumed run repeats the
    step in which the earlier one ended, and each has its own row of it.
    """
    found = sorted(steps, key=lambda place: (runs.index(place[0]), *place))
    shown = found[-most:]
    which = f", the last {len(shown)} of {len(found)}" if len(shown) < len(found) else ""
    columns = ("step", "judge", "n", "failed", "score", "slowest", "waited", "tries", "source", "sample")
    title = f"steps, and the slowest sample of each{which}"
    made = table(*(("run",) if len(runs) > 1 else ()), *columns, left=_LEFT, title=title)
    for place in shown:
        run, step, split, judge = place
        parts = steps[place]
        slowest, failed = max(parts, key=lambda part: part.latency_s), sum(part.failed for part in parts)
        rewarded = sum(part.rewarded for part in parts)
        mean = sum(part.rewards or 0.0 for part in parts) / rewarded if rewarded else None
        waited = None if slowest.service_s is None else max(0.0, slowest.latency_s - slowest.service_s)
        made.add_row(
            *([_name(run)] if len(runs) > 1 else []),
            *(_name(f"{'-' if step < 0 else step} {split}".strip()), _name(judge)),
            *(str(sum(part.outcomes for part in parts)), Text(str(failed), "red" if failed else ""), number(mean)),
            *(seconds(slowest.latency_s), seconds(waited), str(slowest.attempts)),
            *(_name(slowest.source), _name(slowest.sample)),
        )
    return made


def _source_table(files: Sequence[str]) -> Table:
    """The sources that answered, the busiest first. Times are of the answered attempts alone."""
    found: dict[str, list[float]] = {}
    for _, source, *counts in rows_of(files, _SOURCES):
        found[source] = [sum(both) for both in zip(found.get(source, [0] * len(counts)), counts, strict=True)]
    columns = ("source", "n", "from journal", "retries", "answers take", "tokens", "USD")
    made = table(*columns, left=_LEFT, title="sources")
    for source, counts in sorted(found.items(), key=lambda item: -item[1][0]):
        *told, timed, total_s, tokens, cost = counts
        mean = seconds(total_s / timed if timed else None)
        made.add_row(_name(source), *map(str, told), mean, short(tokens), f"{cost:.4f}" if cost else "-")
    return made


def _name(text: str) -> Text:
    shown = text if len(text) <= _WIDEST_NAME else text[: _WIDEST_NAME - 3] + "..."
    return Text(one_line(shown, _NAME_CHARS))
