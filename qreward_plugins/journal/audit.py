"""Looks in journals for what a policy does to a judge, and for a judge that changes: `qreward audit`.

Each check compares the first third of the steps with the last one, or looks at all entries. Groups are the units of
every test, because their samples are not independent. A check raises an alarm for a large effect that is no chance: its
distance from 0, or from the bound, is `_SURE` standard errors. So clean runs raise few. What the checks look for is in
Gao et al., Scaling Laws for Reward Model Overoptimization (2210.10760), and Singhal et al., A Long Way to Go:
Investigating Length Correlations in RLHF (2310.03716).
"""

from __future__ import annotations

import json
import math
import sqlite3
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any, NamedTuple, TypeAlias

from ..errors import InputError
from ..secrets import one_line
from .comparison import rank_correlation
from .database import reading

_SURE = 3.5
_RAW = "coalesce(raw_score, score)"
"""The judge's own score: another reward range is no other answer."""
_ASKED = "outcome = 'scored' AND cached = 0 AND coalesce(split, 'train') = 'train'"
"""New answers about training samples."""
_FEWEST_STEPS = 6
_FEWEST_GROUPS = 20
"""In each third."""

_GROWTH = 1.2
_FOLLOWS = 0.3
"""Alarm if responses have grown by this factor, and the rank correlation of their length and reward is above this."""
_EXPLAINS = 0.7
_FALLS = 0.3
"""Alarm if one component explains this share of the rewards' variance within groups, and did not before, while another
one has fallen by so many standard deviations."""
_FLAT = 0.5
_FLATTER = 0.2
"""Alarm if more than the first share of the groups are flat, the second one more than at first."""
_FLIPS = 0.05
_FEWEST_REPEATS = 20
"""Alarm if surely more than this share of repeated questions change by half of the range of rewards or more."""
_WORDS = 4
_MOST_PHRASES = 5_000
_PAYS = 0.5
"""Alarm if responses with a phrase of so many words get rewards that are so many standard deviations higher, and the
phrase is twice as frequent as at first."""
_READ_WORDS = 600
"""Words of a response that are read."""
_MOST_TEXTS = 2_000
"""Responses of each third."""


def audit(paths: Sequence[str], run: str | None = None) -> tuple[str, list[AuditFinding]]:
    """Audit the training samples of a run, by default the latest one, in journals. Return the run and what was found.
    Raises `JournalError`, and `InputError` if there is no reward of it.
    """
    with ExitStack() as opened:
        entries = _Entries([opened.enter_context(reading(path)) for path in paths], run)
        judges = _judges(entries)
        if not judges:
            of_run = "" if run is None else f" in run {run}"
            raise InputError(f"{' and '.join(paths)}: no training sample has a reward{of_run}")
        findings = [finding for name in sorted(judges) for finding in _Judged(entries, name).findings()]
        return entries.run or "", [*findings, *_flips(entries), *_models(entries)]


class _Entries:
    """The entries of one run in several journals; None: of the latest run."""

    def __init__(self, connections: Sequence[sqlite3.Connection], run: str | None) -> None:
        self.connections = connections
        query = (
            "SELECT recorded_at, run_id FROM outcomes WHERE coalesce(split, 'train') = 'train' ORDER BY 1 DESC LIMIT 1"
        )
        latest = [row for connection in connections for row in connection.execute(query)]
        self.run = run if run is not None else max(latest, default=(0.0, None))[1]

    def rows(self, columns: str, where: str, *values: Any, then: str = "", table: str = "outcomes") -> Iterator[Any]:
        query = f"SELECT {columns} FROM {table} WHERE run_id IS ? AND {where} {then}"
        for connection in self.connections:
            yield from connection.execute(query, (self.run, *values))


@dataclass(frozen=True)
class AuditFinding:
    """What a check has found. `alarm` is None if there is too little to tell."""

    check: str
    about: str
    """The judge or the source."""
    alarm: bool | None
    said: str
    figures: Mapping[str, float | str] = field(default_factory=dict)
    step: int | None = None
    """Where to look first: the first step of the last third, or the one in which another model answered; None if there
    are no steps."""


_TOO_FEW = f"too few: it takes {_FEWEST_STEPS} steps, and {_FEWEST_GROUPS} groups in each third of them"

_Found: TypeAlias = tuple[bool | None, str, Mapping[str, float | str]]
"""The alarm, what was found, and its figures."""


def _judges(entries: _Entries) -> set[str]:
    """The judges that give rewards: sums, or all if there are none."""
    where = "coalesce(split, 'train') = 'train' AND outcome = 'scored'"
    rows = set(entries.rows("DISTINCT judge, source = ''", where))
    return {name for name, is_whole in rows if is_whole} or {name for name, _ in rows}


class _Scored(NamedTuple):
    reward: float
    chars: int | None
    components: Mapping[str, float]


_Groups: TypeAlias = Sequence[Sequence[_Scored]]


def _each(groups: _Groups, of: Callable[[Sequence[_Scored]], float]) -> list[float]:
    """A figure of each group that has it."""
    return [value for value in map(of, groups) if not math.isnan(value)]


class _Text(NamedTuple):
    """A response. `reward` is less the mean of its step."""

    is_last: bool
    group: tuple[int, str]
    reward: float
    phrases: frozenset[int]
    body: bytes


class _Judged:
    """The rewards of one judge for training samples: the groups of the first and of the last third of the steps."""

    def __init__(self, entries: _Entries, name: str) -> None:
        where = "judge = ? AND outcome = 'scored' AND step IS NOT NULL AND coalesce(split, 'train') = 'train'"
        counts: Counter[int] = Counter()
        totals: Counter[int] = Counter()
        for step, count, total in entries.rows("step, count(*), sum(score)", where, name, then="GROUP BY 1"):
            counts[step] += count
            totals[step] += total
        steps = sorted(counts)
        size = len(steps) // 3 if len(steps) >= _FEWEST_STEPS else 0
        self._name = name
        self._last_from = steps[len(steps) - size] if size else None
        self._texts: list[_Text] = []
        thirds: list[list[list[_Scored]]] = [[], []]
        where += " AND step BETWEEN ? AND ?"
        for place, chosen in enumerate((steps[:size], steps[len(steps) - size :])):
            if not chosen:
                continue
            groups: dict[tuple[int, str], dict[str, _Scored]] = defaultdict(dict)
            bounds = (name, chosen[0], chosen[-1])
            columns = "step, group_id, coalesce(sample_id, id), score, response_chars, components"
            for step, group, sample, reward, chars, components in entries.rows(
                columns, where, *bounds, then="ORDER BY id"
            ):
                groups[step, group or ""][sample] = _Scored(reward, chars, json.loads(components or "{}"))
            thirds[place] += [list(group.values()) for group in groups.values()]
            columns, table = (
                "step, coalesce(group_id, sample_id, id), score, body",
                "outcomes JOIN texts ON response = hash",
            )
            then = f"ORDER BY hash LIMIT {_MOST_TEXTS // len(entries.connections)}"
            for step, group, reward, body in entries.rows(columns, where, *bounds, then=then, table=table):
                phrases = frozenset(map(_digest, _phrases_of(body)))
                self._texts.append(
                    _Text(bool(place), (step, group), reward - totals[step] / counts[step], phrases, body)
                )
        self._first, self._last = thirds

    def findings(self) -> Iterator[AuditFinding]:
        enough = min(len(self._first), len(self._last)) >= _FEWEST_GROUPS
        for check in (self._length, self._component, self._groups, self._phrases):
            alarm, said, figures = check() if enough else (None, _TOO_FEW, {})
            step = self._last_from if enough else None
            yield AuditFinding(check.__name__[1:], self._name, alarm, said, figures, step)

    def _thirds(self, of: Callable[[Sequence[_Scored]], float]) -> tuple[list[float], list[float]]:
        """A figure of each group that has it, in the first and in the last third."""
        return _each(self._first, of), _each(self._last, of)

    def _length(self) -> _Found:
        """Rewards follow length, and responses grow."""
        first, last = self._thirds(_mean_chars)
        follows = _each(self._last, _length_correlation)
        if min(len(first), len(last), len(follows)) < 2:
            return None, "too few: no group has rewards and lengths that differ", {}
        growth, correlation = fmean(last) / max(1.0, fmean(first)), fmean(follows)
        grown = _surely_above(last, first, fmean(first) * (_GROWTH - 1))
        alarm = grown and _surely_above(follows, [0.0, 0.0], _FOLLOWS)
        said = f"responses grew by {growth - 1:+.0%}; rank correlation of length and reward in groups {correlation:.2f}"
        if growth >= _GROWTH and correlation > _FOLLOWS and not alarm:
            said += ", which may be chance"
        return alarm, said, {"growth": growth, "correlation": correlation}

    def _component(self) -> _Found:
        """One component explains the rewards, and did not before, while another one falls."""
        names = sorted({name for group in self._last[:50] for each in group for name in each.components})
        if len(names) < 2:
            return None, "the judge has fewer than two components", {}
        shares = {name: [_explained(groups, name) for groups in (self._first, self._last)] for name in names}
        top = max(names, key=lambda name: shares[name][1])
        fallen = [name for name in names if name != top and self._falls(name)]
        before, now = shares[top]
        alarm = now >= _EXPLAINS > before and now - before >= 1 - _EXPLAINS and bool(fallen)
        also = f", while {' and '.join(one_line(name, 60) for name in fallen)} fell" if fallen else ""
        said = f"{one_line(top, 60)} explains {now:.0%} of the variance in groups, at first {before:.0%}{also}"
        return alarm, said, {"component": top, "explained": now, "before": before}

    def _falls(self, name: str) -> bool:
        first, last = self._thirds(lambda group: _mean_of(group, name))
        if min(len(first), len(last)) < 2:
            return False
        return _surely_above(first, last, _FALLS * math.sqrt(variance(first)))

    def _groups(self) -> _Found:
        """Groups whose rewards are all equal, from which a trainer learns nothing."""
        first, last = self._thirds(_is_flat)
        if min(len(first), len(last)) < 2:
            return None, "too few: no group has two samples", {}
        before, now = fmean(first), fmean(last)
        alarm = now > _FLAT and _surely_above(last, first, 0.0) and now - before >= _FLATTER
        said = f"{now:.0%} of the groups have equal rewards, at first {before:.0%}"
        return alarm, said, {"flat": now, "before": before}

    def _phrases(self) -> _Found:
        """Phrases that pay, and that spread."""
        last = [text for text in self._texts if text.is_last]
        first = Counter(phrase for text in self._texts if not text.is_last for phrase in text.phrases)
        first_count = len(self._texts) - len(last)
        if min(first_count, len(last)) < _FEWEST_GROUPS:
            return None, "too few responses are kept (engine.journal.keep)", {}
        counts = Counter(phrase for text in last for phrase in text.phrases)
        spread = [
            (phrase, count)
            for phrase, count in counts.most_common(_MOST_PHRASES)
            if count >= _FEWEST_GROUPS and count / len(last) > 2 * first[phrase] / first_count
        ]
        deviation = math.sqrt(variance(text.reward for text in last))
        # Bonferroni: of so many phrases, chance makes some look good. exp(-z^2 / 2) bounds the tail of a normal.
        sure = math.sqrt(_SURE**2 + 2 * math.log(max(1, len(spread))))
        best: tuple[float, int, int] | None = None
        for phrase, count in spread:
            # The siblings of a group may share a phrase because they share their question.
            having = _by_group(text for text in last if phrase in text.phrases)
            others = _by_group(text for text in last if phrase not in text.phrases)
            if min(len(having), len(others)) < _FEWEST_GROUPS:
                continue
            effect = fmean(having) - fmean(others)
            if _surely_above(having, others, 0.0, sure) and effect >= _PAYS * deviation:
                best = max(best or (effect, phrase, count), (effect, phrase, count))
        if best is None:
            return False, f"none of {len(spread):,} phrases that spread pays", {}
        effect, phrase, count = best
        words = (words for text in last for words in _phrases_of(text.body) if _digest(words) == phrase)
        shown = one_line(" ".join(next(words)), 80)
        said = f'"{shown}" is in {count:,} of {len(last):,} responses, and goes with {effect:+.2f} reward'
        return True, said, {"phrase": shown, "effect": effect, "responses": count}


def _flips(entries: _Entries) -> Iterator[AuditFinding]:
    """Repeated questions whose answers differ."""
    ranges: dict[str, list[float]] = defaultdict(list)
    repeated: dict[str, list[float]] = defaultdict(list)
    where = f"{_ASKED} AND key IS NOT NULL"
    for judge, *ends in entries.rows(f"judge, min({_RAW}), max({_RAW})", where, then="GROUP BY 1"):
        ranges[judge] += ends
    then = "GROUP BY 1, key HAVING count(*) > 1"
    for judge, change in entries.rows(f"judge, max({_RAW}) - min({_RAW})", where, then=then):
        repeated[judge].append(change)
    for judge, ends in sorted(ranges.items()):
        count, half = len(repeated[judge]), (max(ends) - min(ends)) / 2
        if count < _FEWEST_REPEATS:
            yield AuditFinding("flips", judge, None, f"too few: {count:,} repeated questions")
            continue
        share = fmean(change >= half > 0 for change in repeated[judge])
        alarm = share - _FLIPS > _SURE * math.sqrt(_FLIPS * (1 - _FLIPS) / count)
        said = f"{share:.1%} of {count:,} repeated questions got another answer"
        yield AuditFinding("flips", judge, alarm, said, {"flips": share, "repeated": count})


def _models(entries: _Entries) -> Iterator[AuditFinding]:
    """Sources whose replies name more than one model."""
    models: dict[str, dict[str, tuple[float, int | None]]] = defaultdict(dict)
    where = f"{_ASKED} AND model != '' AND source != ''"
    # SQLite takes the step from the row with the minimum.
    columns = "source, model, min(recorded_at), step"
    for source, model, *first in entries.rows(columns, where, then="GROUP BY 1, 2"):
        at, step = models[source].get(model, (math.inf, None))
        models[source][model] = (first[0], first[1]) if first[0] < at else (at, step)
    for source, since in sorted(models.items()):
        ordered = sorted(since, key=lambda name: since[name][0])
        shown = one_line(", then ".join(ordered), 400)
        step = since[ordered[1]][1] if len(ordered) > 1 else None
        yield AuditFinding("models", source, len(ordered) > 1, shown, {"models": len(ordered)}, step)


def _surely_above(values: Sequence[float], others: Sequence[float], bound: float, sure: float = _SURE) -> bool:
    """Whether the mean of `values` is above that of `others` by more than `bound`, by Welch's test."""
    error = math.sqrt(variance(values) / len(values) + variance(others) / len(others))
    distance = fmean(values) - fmean(others) - bound
    return distance > sure * error and distance > 0


def _mean_chars(group: Sequence[_Scored]) -> float:
    known = [each.chars for each in group if each.chars is not None]
    return fmean(known) if known else math.nan


def _length_correlation(group: Sequence[_Scored]) -> float:
    return rank_correlation([(each.chars, each.reward) for each in group if each.chars is not None])


def _is_flat(group: Sequence[_Scored]) -> float:
    return float(len({each.reward for each in group}) == 1) if len(group) > 1 else math.nan


def _mean_of(group: Sequence[_Scored], name: str) -> float:
    values = [each.components.get(name, math.nan) for each in group]
    return fmean(values) if values and not math.isnan(sum(values)) else math.nan


def _explained(groups: _Groups, name: str) -> float:
    """The share of the variance of rewards within groups that goes with a component: the squared correlation."""
    with_both = [[(each.components.get(name, math.nan), each.reward) for each in group] for group in groups]
    xx = yy = xy = 0.0
    for pairs in with_both:
        if not pairs or any(math.isnan(x) for x, _ in pairs):
            continue
        x_mean, y_mean = fmean(x for x, _ in pairs), fmean(y for _, y in pairs)
        xx += sum((x - x_mean) ** 2 for x, _ in pairs)
        yy += sum((y - y_mean) ** 2 for _, y in pairs)
        xy += sum((x - x_mean) * (y - y_mean) for x, y in pairs)
    return xy**2 / (xx * yy) if xx and yy else 0.0


def _by_group(texts: Iterable[_Text]) -> list[float]:
    """The mean reward of each group."""
    groups: dict[tuple[int, str], list[float]] = defaultdict(list)
    for text in texts:
        groups[text.group].append(text.reward)
    return [fmean(rewards) for rewards in groups.values()]


def _digest(words: tuple[str, ...]) -> int:
    """A number for a phrase, the same in every process."""
    return zlib.crc32(" ".join(words).encode())


def _phrases_of(body: bytes) -> Iterator[tuple[str, ...]]:
    """The phrases at the beginning and the end of a text."""
    words = zlib.decompress(body).decode().lower().split()
    words = words if len(words) <= _READ_WORDS else [*words[: _READ_WORDS // 2], *words[-_READ_WORDS // 2 :]]
    yield from zip(*(words[place:] for place in range(_WORDS)), strict=False)
