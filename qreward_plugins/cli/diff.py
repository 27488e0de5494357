"""`qreward diff`: how two judges, or two versions of one, differ on the same samples.

Intervals are bootstrap intervals over groups, because the samples of a group are not independent (Efron and Tibshirani,
An Introduction to the Bootstrap, 1993). The rank correlation within groups tells whether a trainer that compares
siblings would notice the difference: it is Spearman's, with the mean rank for ties, averaged over the groups in which
both judges see a difference. Kappa is Cohen's (Educational and Psychological Measurement, 1960).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from ..journal.database import reading
from ..journal.stories import journals_in
from ..observers.batch_report import percentile
from ..secrets import one_line
from .console import OK, OUT, number_of, print_whole, say

DRAWS = 1_000
"""Samples of the bootstrap."""
_SAID_CHARS = 120
_REWARD = "coalesce(score, floor)"


def command(
    first: Annotated[str, typer.Argument(metavar="A", help="A journal.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one, or the same with --other-judge.")],
    judge: Annotated[str | None, typer.Option(metavar="NAME", help="The judge in A. Default: its only one.")] = None,
    other: Annotated[
        str | None, typer.Option("--other-judge", metavar="NAME", help="The judge in B. Default: that of --judge.")
    ] = None,
    at: Annotated[float, typer.Option(metavar="REWARD", help="From this reward on a sample counts as good.")] = 0.5,
    most: Annotated[int, typer.Option("--most", metavar="N", min=0, help="How many of the largest changes.")] = 5,
) -> int:
    """Compare the rewards of two journals on the samples that both have, such as those of qreward score with two
    configurations: by id, step and split, of the latest run in each.

    Exit codes: 0 compared; 2 there is no such journal or judge, or no sample is in both.
    """
    a, b = _Judged.read(first, judge), _Judged.read(second, other or judge)
    if (a.path, a.judge) == (b.path, b.judge):
        remedy = "name another journal (score again with another --out), or --other-judge"
        raise InputError(f"A and B are both {a.judge} of {first}; {remedy}")
    pairs = list(_pairs(a, b))
    if not pairs:
        raise InputError(
            f"no sample has a reward in both {first} and {second}; they are compared by id, step and split"
        )
    others = sum(not pair.same for pair in pairs)
    if others == len(pairs):
        raise InputError(f"{first} and {second} have other responses under the same ids; they are not the same samples")
    for name, one in (("A", a), ("B", b)):
        failed = f", {one.failed:,} without a reward" if one.failed else ""
        count = number_of(len(one.samples), "sample")
        say(OUT, f"{name}: {_line(one.path)}, run {_line(one.run)}, judge {_line(one.judge)}: {count}{failed}")
    differ = f"; {others:,} of them are other responses under the same id" if others else ""
    say(OUT, f"{number_of(len(pairs), 'sample')} with a reward in both{differ}\n")
    print_whole(OUT, _table(pairs, at))
    down = sum(pair.a >= at > pair.b for pair in pairs)
    up = sum(pair.b >= at > pair.a for pair in pairs)
    share = (down + up) / len(pairs)
    say(OUT, f"\n{down + up:,} change sides at {at:g} ({share:.1%}): {down:,} fall below it, {up:,} rise to it")
    changed = [pair for pair in pairs if pair.a != pair.b]
    if most and changed:
        OUT.print()
        print_whole(OUT, _changes(changed, most))
    return OK


@dataclass(frozen=True)
class _Pair:
    """One sample by two judges."""

    name: str
    group: str
    a: float
    b: float
    said: tuple[str, str]
    same: bool
    """Whether both have judged the same response, as far as is known."""


@dataclass(frozen=True)
class _Judged:
    """What one judge made of the samples of the latest run in a journal, by id, step and split."""

    path: str
    judge: str
    run: str
    samples: Mapping[tuple[Any, ...], tuple[float | None, str | None, str, str | None]]
    """The reward, the group, what was said, and the hash of the response if it is kept."""

    @property
    def failed(self) -> int:
        return sum(reward is None for reward, *_ in self.samples.values())

    @classmethod
    def read(cls, path: str, judge: str | None) -> _Judged:
        """Read a journal. Raises `JournalError`, and `InputError` for a judge that is not there."""
        if journals_in([path]) != [path]:
            raise InputError(f"{path} is a directory; name one journal in it")
        with reading(path) as connection:
            ask = connection.execute
            run = ask("SELECT run_id FROM outcomes ORDER BY recorded_at DESC LIMIT 1").fetchone()
            judges = [name for (name,) in ask("SELECT DISTINCT judge FROM outcomes WHERE run_id IS ?", run or (None,))]
            wholes = "SELECT DISTINCT judge FROM outcomes WHERE run_id IS ? AND outcome = 'scored' AND source = ''"
            whole = [name for (name,) in ask(wholes, run or (None,))]
            chosen = judge if judge is not None else next(iter(whole if len(whole) == 1 else judges), "")
            if chosen not in judges or (judge is None and len(judges) > 1 and len(whole) != 1):
                known = ", ".join(sorted(judges)) or "none"
                raise InputError(f"{path}: name a judge of its latest run with --judge or --other-judge: {known}")
            columns = f"sample_id, step, coalesce(split, 'train'), {_REWARD}, group_id, "
            columns += "coalesce(rationale, detail, ''), response"
            where = "run_id IS ? AND judge = ? AND sample_id IS NOT NULL ORDER BY id"
            rows = ask(f"SELECT {columns} FROM outcomes WHERE {where}", (*(run or (None,)), chosen))
            return cls(path, chosen, run[0] if run else "", {row[:3]: row[3:] for row in rows})


def _pairs(a: _Judged, b: _Judged) -> Iterator[_Pair]:
    for place, (reward, group, said, response) in a.samples.items():
        other, _, other_said, other_response = b.samples.get(place, (None, None, "", None))
        if reward is not None and other is not None:
            # Without texts in one of them, the id has to do.
            same = response == other_response or None in (response, other_response)
            # A sample without a group is one of its own.
            own = repr(place) if group is None else f"{place[1]} {group}"
            yield _Pair(str(place[0]), own, reward, other, (said, other_said), same)


def _table(pairs: Sequence[_Pair], at: float) -> Table:
    groups: dict[str, list[_Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.group, []).append(pair)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("", "value", "95 % interval"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    rows: list[tuple[str, Callable[[Iterable[Sequence[_Pair]]], float]]] = [
        ("mean of A", lambda drawn: fmean(pair.a for group in drawn for pair in group)),
        ("mean of B", lambda drawn: fmean(pair.b for group in drawn for pair in group)),
        ("mean of B - A", lambda drawn: fmean(pair.b - pair.a for group in drawn for pair in group)),
        (f"kappa at {at:g}", lambda drawn: kappa([(p.a >= at, p.b >= at) for group in drawn for p in group])),
    ]
    for name, of in rows:
        table.add_row(name, *_with_interval(of, list(groups.values())))
    within = [rank_correlation([(pair.a, pair.b) for pair in group]) for group in groups.values()]
    there = [value for value in within if not math.isnan(value)]
    of_groups = f"rank correlation within {number_of(len(there), 'group')}"
    table.add_row(of_groups, *_with_interval(lambda drawn: fmean(drawn) if drawn else math.nan, there))
    table.add_row("rank correlation of all", _number(rank_correlation([(pair.a, pair.b) for pair in pairs])), "")
    return table


def _with_interval(of: Callable[[Any], float], units: Sequence[Any]) -> tuple[str, str]:
    """A figure of units (groups), and its bootstrap interval."""
    if not units:
        return "-", ""
    rng = random.Random(0)
    drawn = [of(rng.choices(units, k=len(units))) for _ in range(DRAWS)] if len(units) > 1 else []
    found = [value for value in drawn if not math.isnan(value)]
    interval = f"{_number(percentile(found, 0.025))} to {_number(percentile(found, 0.975))}" if found else ""
    return _number(of(units)), interval


def kappa(pairs: Sequence[tuple[bool, bool]]) -> float:
    """Cohen's kappa of two judges who say yes or no; NaN where they agree by chance alone."""
    both = sum(a == b for a, b in pairs) / len(pairs)
    yes_a, yes_b = (fmean(pair[place] for pair in pairs) for place in (0, 1))
    by_chance = yes_a * yes_b + (1 - yes_a) * (1 - yes_b)
    return (both - by_chance) / (1 - by_chance) if by_chance < 1 else math.nan


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation, with the mean rank for ties; NaN if all of one side are equal."""
    if len(pairs) < 2:
        return math.nan
    try:
        return correlation(*(_ranks([pair[place] for pair in pairs]) for place in (0, 1)))
    except StatisticsError:
        return math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in range(start, end):
            ranks[order[place]] = (start + end - 1) / 2
        start = end
    return ranks


def _changes(pairs: Sequence[_Pair], most: int) -> Table:
    table = Table(
        title="largest changes", title_justify="left", title_style="bold", box=None, padding=(0, 1), pad_edge=False
    )
    for name in ("A", "B", "sample", "A said", "B said"):
        table.add_column(name, justify="right" if name in ("A", "B") else "left", overflow="fold")
    for pair in sorted(pairs, key=lambda pair: -abs(pair.b - pair.a))[:most]:
        texts = (Text(_line(text)) for text in (pair.name, *pair.said))
        table.add_row(_number(pair.a), _number(pair.b), *texts)
    return table


def _line(text: str) -> str:
    return one_line(text, _SAID_CHARS)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"
