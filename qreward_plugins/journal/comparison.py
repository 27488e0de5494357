"""Compares what two judges, or two versions of one, made of the same samples.

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
from typing import Any, NamedTuple

from ..errors import InputError
from ..observers.batch_report import percentile
from .database import reading

DRAWS = 1_000
"""Samples of the bootstrap."""
MOST = 200_000
"""Most entries of one judge that are compared; the latest."""


class EntryPlace(NamedTuple):
    """Where an entry is: the number of its journal, and its row."""

    journal: int
    row: int


@dataclass(frozen=True)
class JudgedPair:
    """One sample by two judges."""

    name: str
    group: str
    a: float
    b: float
    said: tuple[str, str]
    same: bool
    """Whether both have judged the same response, as far as is known."""
    places: tuple[EntryPlace, EntryPlace]


class Judgement(NamedTuple):
    """What a judge made of a sample. `reward` is None if it failed, `response` the hash of its text if that is kept."""

    reward: float | None
    group: str | None
    said: str
    response: str | None
    place: EntryPlace


@dataclass(frozen=True)
class Judged:
    """What one judge made of the samples of a run, by id, step and split."""

    run: str
    judge: str
    samples: Mapping[tuple[Any, ...], Judgement]

    @property
    def failed(self) -> int:
        return sum(each.reward is None for each in self.samples.values())

    @classmethod
    def read(cls, paths: Sequence[str], run: str, judge: str) -> Judged:
        """Read journals. Raises `JournalError`."""
        columns = "sample_id, step, coalesce(split, 'train'), coalesce(score, floor), group_id, "
        columns += "coalesce(rationale, detail, ''), response, id"
        where = "run_id IS ? AND judge = ? AND sample_id IS NOT NULL"
        found: dict[tuple[Any, ...], Judgement] = {}
        for number, path in enumerate(paths):
            with reading(path) as connection:
                query = f"SELECT {columns} FROM outcomes WHERE {where} ORDER BY id DESC LIMIT ?"
                rows = connection.execute(query, (run, judge, MOST)).fetchall()
            for *place, reward, group, said, response, row in reversed(rows):
                found[tuple(place)] = Judgement(reward, group, said, response, EntryPlace(number, row))
        return cls(run, judge, found)


def latest_judges(path: str) -> tuple[str, list[str], list[str]]:
    """Return the latest run of a journal, its judges, and those of them that sum up others. Raises `JournalError`."""
    with reading(path) as connection:
        ask = connection.execute
        run = ask("SELECT run_id FROM outcomes ORDER BY recorded_at DESC LIMIT 1").fetchone() or ("",)
        judges = [name for (name,) in ask("SELECT DISTINCT judge FROM outcomes WHERE run_id IS ?", run)]
        wholes = "SELECT DISTINCT judge FROM outcomes WHERE run_id IS ? AND outcome = 'scored' AND source = ''"
        return run[0], judges, [name for (name,) in ask(wholes, run)]


def pairs_of(a: Judged, b: Judged) -> list[JudgedPair]:
    """Return the samples to which both gave a reward. Raises `InputError` if there are none, or none with the same
    response.
    """
    found = list(_pairs(a, b))
    if not found:
        raise InputError("no sample has a reward in both; they are compared by id, step and split")
    if not any(pair.same for pair in found):
        raise InputError("both have other responses under the same ids; they are not the same samples")
    return found


def _pairs(a: Judged, b: Judged) -> Iterator[JudgedPair]:
    for place, one in a.samples.items():
        other = b.samples.get(place)
        if other is not None and one.reward is not None and other.reward is not None:
            # Without texts in one of them, the id has to do.
            same = one.response == other.response or None in (one.response, other.response)
            # A sample without a group is one of its own.
            group = repr(place) if one.group is None else f"{place[1]} {one.group}"
            said, places = (one.said, other.said), (one.place, other.place)
            yield JudgedPair(str(place[0]), group, one.reward, other.reward, said, same, places)


class Figure(NamedTuple):
    """A figure of two judges, with its 95 % interval if there are several groups. NaN if it is undefined."""

    name: str
    value: float
    low: float | None
    high: float | None


def figures(pairs: Sequence[JudgedPair], at: float) -> list[Figure]:
    """Return means, kappa and rank correlations. From the reward `at` on a sample counts as good."""
    groups: dict[str, list[JudgedPair]] = {}
    for pair in pairs:
        groups.setdefault(pair.group, []).append(pair)
    of: list[tuple[str, Callable[[Iterable[Sequence[JudgedPair]]], float]]] = [
        ("mean of A", lambda drawn: fmean(pair.a for group in drawn for pair in group)),
        ("mean of B", lambda drawn: fmean(pair.b for group in drawn for pair in group)),
        ("mean of B - A", lambda drawn: fmean(pair.b - pair.a for group in drawn for pair in group)),
        (f"kappa at {at:g}", lambda drawn: kappa([(p.a >= at, p.b >= at) for group in drawn for p in group])),
    ]
    found = [_with_interval(name, each, list(groups.values())) for name, each in of]
    within = [rank_correlation([(pair.a, pair.b) for pair in group]) for group in groups.values()]
    there = [value for value in within if not math.isnan(value)]
    name = f"rank correlation within {len(there):,} group{'' if len(there) == 1 else 's'}"
    found.append(_with_interval(name, lambda drawn: fmean(drawn) if drawn else math.nan, there))
    whole = rank_correlation([(pair.a, pair.b) for pair in pairs])
    return [*found, Figure("rank correlation of all", whole, None, None)]


def _with_interval(name: str, of: Callable[[Any], float], units: Sequence[Any]) -> Figure:
    """A figure of units (groups), and its bootstrap interval."""
    if not units:
        return Figure(name, math.nan, None, None)
    rng = random.Random(0)
    # A bootstrap of 200,000 samples takes minutes, and its interval is a hair.
    count = max(50, min(DRAWS, 2_000_000 // len(units)))
    drawn = [of(rng.choices(units, k=len(units))) for _ in range(count)] if len(units) > 1 else []
    values = [value for value in drawn if not math.isnan(value)]
    low, high = (percentile(values, 0.025), percentile(values, 0.975)) if values else (None, None)
    return Figure(name, of(units), low, high)


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
