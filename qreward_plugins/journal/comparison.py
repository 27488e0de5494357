"""Compares what two judges, or two versions of one, made of the same samples.

Intervals are bootstrap intervals over groups, because the samples of a group are not independent (Efron and Tibshirani,
An Introduction to the Bootstrap, 1993). The rank correlation within groups tells whether a trainer that compares
siblings would notice the difference: it is Spearman's, with the mean rank for ties, averaged over the groups in which
both judges see a difference. Kappa is Cohen's (Educational and Psychological Measurement, 1960).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean
from typing import Any, NamedTuple, TypeVar

from ..errors import InputError
from ..observers.batch_report import percentile
from .database import reading, rows_of

DRAWS = 1_000
"""Samples of the bootstrap."""
MOST = 200_000
"""Most entries of one judge that are compared; the latest."""
MOST_DRAWN = 2_000_000
"""Units that all samples of a bootstrap have together, about."""

_Unit = TypeVar("_Unit")


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
    def read(cls, paths: Sequence[str], run: str, judge: str, most: int = MOST) -> Judged:
        """Read the latest entries of journals. Raises `JournalError`."""
        columns = "sample_id, step, coalesce(split, 'train'), coalesce(score, floor), group_id, "
        columns += "coalesce(rationale, detail, ''), response, id"
        where = "run_id IS ? AND judge = ? AND sample_id IS NOT NULL"
        query = f"SELECT * FROM (SELECT {columns} FROM outcomes WHERE {where} ORDER BY id DESC LIMIT ?) ORDER BY id"
        found: dict[tuple[Any, ...], Judgement] = {}
        for number, *place, reward, group, said, response, row in rows_of(paths, query, (run, judge, most)):
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
    sums = [_sums(group, at) for group in groups.values()]
    of: list[tuple[str, Callable[[Sequence[float]], float]]] = [
        ("mean of A", lambda total: total[1] / total[0]),
        ("mean of B", lambda total: total[2] / total[0]),
        ("mean of B - A", lambda total: total[3] / total[0]),
        (f"kappa at {at:g}", lambda total: _kappa(total[4], total[5], total[6], total[0])),
    ]
    whole, drawn = _added(sums), [_added(sample) for sample in bootstrap(sums)]
    found = [Figure(name, each(whole), *interval(map(each, drawn))) for name, each in of]
    within = [rank_correlation([(pair.a, pair.b) for pair in group]) for group in groups.values()]
    there = [value for value in within if not math.isnan(value)]
    name = f"rank correlation within {len(there):,} group{'' if len(there) == 1 else 's'}"
    mean = fmean(there) if there else math.nan
    found.append(Figure(name, mean, *interval(map(fmean, bootstrap(there)))))
    correlation_of_all = rank_correlation([(pair.a, pair.b) for pair in pairs])
    return [*found, Figure("rank correlation of all", correlation_of_all, None, None)]


def _sums(group: Sequence[JudgedPair], at: float) -> tuple[float, ...]:
    """Of a group: how many, the sums of A, of B and of B - A, and how many are good for A, for B, and alike."""
    good = [(pair.a >= at, pair.b >= at) for pair in group]
    return (
        float(len(group)),
        math.fsum(pair.a for pair in group),
        math.fsum(pair.b for pair in group),
        math.fsum(pair.b - pair.a for pair in group),
        float(sum(a for a, _ in good)),
        float(sum(b for _, b in good)),
        float(sum(a == b for a, b in good)),
    )


def _added(sums: Sequence[tuple[float, ...]]) -> list[float]:
    return [math.fsum(column) for column in zip(*sums, strict=True)]


def bootstrap(units: Sequence[_Unit]) -> Iterator[list[_Unit]]:
    """Samples of units (groups), fewer of many units: their intervals are narrow anyway. None of less than two."""
    rng = random.Random(0)
    for _ in range(max(MOST_DRAWN // len(units), 50) if len(units) > MOST_DRAWN // DRAWS else DRAWS * (len(units) > 1)):
        yield rng.choices(units, k=len(units))


def interval(values: Iterable[float]) -> tuple[float | None, float | None]:
    """The middle 95 % of what a figure is in the samples of a bootstrap; None if it is undefined in all of them."""
    known = [value for value in values if not math.isnan(value)]
    return (percentile(known, 0.025), percentile(known, 0.975)) if known else (None, None)


def kappa(pairs: Sequence[tuple[bool, bool]]) -> float:
    """Cohen's kappa of two judges who say yes or no; NaN where they agree by chance alone."""
    alike = sum(a == b for a, b in pairs)
    return _kappa(sum(a for a, _ in pairs), sum(b for _, b in pairs), alike, len(pairs))


def _kappa(yes_a: float, yes_b: float, alike: float, count: float) -> float:
    by_chance = (yes_a * yes_b + (count - yes_a) * (count - yes_b)) / count**2
    return (alike / count - by_chance) / (1 - by_chance) if by_chance < 1 else math.nan


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation, with the mean rank for ties; NaN if all of one side are equal."""
    if len(pairs) < 2:
        return math.nan
    try:
        return correlation(*(ranks([pair[place] for pair in pairs]) for place in (0, 1)))
    except StatisticsError:
        return math.nan


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value from 0, the mean rank for ties."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]
