"""The figures of `qreward bench`: what a judge made of labelled rows, and how two judges differ.

A row is judged if each of its answers has a reward. Other rows are counted beside the figures and never enter one: a
failed call is no wrong answer. Ties count as in RewardBench 2 (Malik et al., 2506.01937): a chosen answer that shares
the highest reward with k - 1 rejected ones counts 1/k. The intervals are bootstrap intervals over groups, as those of
`qreward diff`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import NamedTuple

from ..files import LabelledRow, Layout
from ..journal.comparison import bootstrap, interval, kappa, rank_correlation, ranks
from ..samples import Cause, Outcome, Scored

MOST_NAMED = 5
"""Rows that are named where two judges differ."""


class GivenReward(NamedTuple):
    """What a judge made of one answer. `reward` is None without a verdict; `problem` is "invalid" if its replies were
    at fault, else "failed", and `why` says more. `usd` is what it cost in this run.
    """

    reward: float | None
    correct: bool | None = None
    problem: str = ""
    usd: float = 0.0
    why: str = ""

    @classmethod
    def of(cls, outcome: Outcome) -> GivenReward:
        """Read an outcome. A floor for an invalid reply is what training gets, but no judgement."""
        failure, spent = outcome.failure, outcome.verdict.spent if isinstance(outcome, Scored) else outcome.spent
        if isinstance(outcome, Scored) and (failure is None or failure.cause is Cause.POLICY):
            return cls(outcome.reward, outcome.verdict.correct, usd=spent.cost_usd)
        # "garbage": one of so many invalid replies that the source is held to be at fault.
        invalid = failure is not None and (failure.cause is Cause.VERDICT or failure.reason == "garbage")
        why = "" if failure is None else failure.detail
        return cls(None, problem="invalid" if invalid else "failed", usd=spent.cost_usd, why=why)


@dataclass
class RowResult:
    """A row, and what a judge made of its answers, of them when it was asked a second time, and of an empty shell in
    their place.
    """

    row: LabelledRow
    first: Sequence[GivenReward] = ()
    second: Sequence[GivenReward] = ()
    shell: GivenReward | None = None

    @property
    def length(self) -> float:
        """By how many characters chosen answers are longer than rejected ones; of a single answer its length."""
        lengths = [len(sample.response) for sample in self.row.samples]
        chosen, rejected = lengths[: self.row.chosen], lengths[self.row.chosen :]
        return fmean(chosen) - (fmean(rejected) if rejected else 0.0)

    @property
    def given(self) -> list[GivenReward]:
        """Everything that the judge was asked for."""
        return [*self.first, *self.second, *([] if self.shell is None else [self.shell])]

    @property
    def shell_passed(self) -> bool | None:
        """Whether an empty shell got as much as the worst of the good answers; None if one of both has no reward."""
        good = [each.reward for each in self.first[: self.row.chosen]]
        if self.shell is None or self.shell.reward is None or not good:
            return None
        known = [reward for reward in good if reward is not None]
        return self.shell.reward >= min(known) if len(known) == len(good) else None


class BenchFigures(NamedTuple):
    """The figures of one judge in one domain ("": in all). NaN: undefined. None: it was not asked for, or cannot be.

    `value` is the accuracy, or Spearman's rank correlation if labels are numbers, over `judged` of `rows` rows, with a
    95 % interval from `low` to `high`. `longer` and `shorter` are the same where the chosen answer is longer or shorter
    than the rejected ones; of labelled answers, for the longer and the shorter half. `invalid` and `failed` count
    answers without a verdict, `flips` those of `asked_twice` rows that were judged otherwise the second time, and
    `shells_passed` those of `shells` empty answers that got as much as a good one.
    """

    domain: str
    rows: int
    judged: int
    value: float
    low: float | None
    high: float | None
    ties: int | None
    invalid: int
    failed: int
    longer: float
    shorter: float
    flips: int | None
    asked_twice: int
    shells_passed: int
    shells: int
    usd: float


@dataclass(frozen=True)
class JudgeComparison:
    """How two judges differ on the rows that both have judged. NaN: undefined.

    `agreement` is Cohen's kappa of whether the chosen answer wins, or the answer is good; if labels are numbers, the
    rank correlation of both judges' rewards. `difference` is the value of A minus that of B, with a 95 % interval.
    `only_a` and `only_b` are rows that only one has right, or those that one ranks highest above the other.
    """

    a: str
    b: str
    rows: int
    agreement: float
    difference: float
    low: float | None
    high: float | None
    only_a: Sequence[str]
    only_b: Sequence[str]


class Grade:
    """Says what a judge decided on a row, and whether that is right. From the reward `middle` on an answer counts as
    good, unless the judge says itself what is correct.
    """

    def __init__(self, layout: Layout, middle: float = 0.5) -> None:
        self.layout = layout
        self._middle = middle

    def decision(self, row: LabelledRow, given: Sequence[GivenReward]) -> float | None:
        """1, 0 (a tie) or -1 if the chosen answers win or lose; 1 or 0 for a good or bad answer; or its reward. None if
        an answer has no reward.
        """
        rewards = [each.reward for each in given if each.reward is not None]
        if not rewards or len(rewards) < len(given):
            return None
        if self.layout == "pairs":
            worst, best = min(rewards[: row.chosen]), max(rewards[row.chosen :])
            return float((worst > best) - (worst < best))
        if self.layout == "numbers":
            return rewards[0]
        good = given[0].correct
        return float(rewards[0] >= self._middle if good is None else good)

    def credit(self, row: LabelledRow, given: Sequence[GivenReward]) -> float | None:
        """How right the decision is, from 0 to 1; of a number the reward. None if an answer has no reward."""
        decision = self.decision(row, given)
        if decision is None or self.layout == "numbers":
            return decision
        if self.layout == "yes_no":
            return float(decision == row.label)
        if decision:
            return float(decision > 0)
        worst = min(each.reward for each in given[: row.chosen] if each.reward is not None)
        return 1.0 / (1 + sum(each.reward == worst for each in given[row.chosen :]))

    def value(self, units: Sequence[tuple[float, float]]) -> float:
        """Accuracy, or rank correlation, of (credit, label) pairs; NaN if there are none."""
        if self.layout == "numbers":
            return rank_correlation(units)
        return fmean(credit for credit, _ in units) if units else math.nan


def figures_of(results: Sequence[RowResult], grade: Grade, domain: str = "") -> BenchFigures:
    """The figures of these rows."""
    judged = [(each, credit) for each in results if (credit := grade.credit(each.row, each.first)) is not None]
    units = [(credit, each.row.label or 0.0) for each, credit in judged]
    groups: dict[str | None, list[tuple[float, float]]] = {}
    for (each, _), unit in zip(judged, units, strict=True):
        groups.setdefault(each.row.samples[0].group_id, []).append(unit)
    low, high = interval(grade.value([u for group in drawn for u in group]) for drawn in bootstrap([*groups.values()]))
    middle = 0.0 if grade.layout == "pairs" else median(each.length for each in results)
    distances = [each.length - middle for each, _ in judged]
    longer = [unit for unit, distance in zip(units, distances, strict=True) if distance > 0]
    shorter = [unit for unit, distance in zip(units, distances, strict=True) if distance < 0]
    twice = [
        (one, other)
        for each, _ in judged
        if (one := grade.decision(each.row, each.first)) is not None
        and (other := grade.decision(each.row, each.second)) is not None
    ]
    problems = Counter(given.problem for each in results for given in each.given)
    shells = [passed for each in results if (passed := each.shell_passed) is not None]
    return BenchFigures(
        domain=domain,
        rows=len(results),
        judged=len(judged),
        value=grade.value(units),
        low=low,
        high=high,
        ties=sum(grade.decision(each.row, each.first) == 0 for each, _ in judged) if grade.layout == "pairs" else None,
        invalid=problems["invalid"],
        failed=problems["failed"],
        longer=grade.value(longer),
        shorter=grade.value(shorter),
        flips=sum(one != other for one, other in twice) if any(each.second for each in results) else None,
        asked_twice=len(twice),
        shells_passed=sum(shells),
        shells=len(shells),
        usd=math.fsum(given.usd for each in results for given in each.given),
    )


@dataclass
class JudgeRun:
    """What one judge made of all rows. `requests`, `invalid_replies` and `seconds` are those of this run, and `cached`
    verdicts come from the journal.
    """

    name: str
    grade: Grade
    results: Sequence[RowResult]
    seconds: float = 0.0
    requests: int = 0
    invalid_replies: int = 0
    cached: int = 0

    @cached_property
    def figures(self) -> list[BenchFigures]:
        """Those of each domain, in the order of the file, if there are several, and of all rows at last."""
        domains = dict.fromkeys(each.row.domain for each in self.results)
        of_each = [
            figures_of([each for each in self.results if each.row.domain == domain], self.grade, domain or "(none)")
            for domain in (domains if len(domains) > 1 else ())
        ]
        return [*of_each, figures_of(self.results, self.grade)]


def compared(a: JudgeRun, b: JudgeRun) -> JudgeComparison:
    """Compare two judges on the same rows."""
    units: list[tuple[LabelledRow, tuple[float, float]]] = []
    decisions = []
    for one, other in zip(a.results, b.results, strict=True):
        credits = a.grade.credit(one.row, one.first), b.grade.credit(one.row, other.first)
        if credits[0] is not None and credits[1] is not None:
            units.append((one.row, (credits[0], credits[1])))
            decisions.append((a.grade.decision(one.row, one.first) == 1, b.grade.decision(one.row, other.first) == 1))
    if a.grade.layout == "numbers":
        agreement = rank_correlation([credits for _, credits in units])
        above = _above(units)
        only_a, only_b = above[:MOST_NAMED], above[::-1][:MOST_NAMED]
    else:
        agreement = kappa(decisions) if decisions else math.nan
        only_a = [row for row, (one, other) in units if one > other]
        only_b = [row for row, (one, other) in units if one < other]

    def difference(units: Sequence[tuple[LabelledRow, tuple[float, float]]]) -> float:
        of_a, of_b = ([(credits[place], row.label or 0.0) for row, credits in units] for place in (0, 1))
        return a.grade.value(of_a) - b.grade.value(of_b)

    low, high = interval(map(difference, bootstrap(units)))
    return JudgeComparison(
        a.name,
        b.name,
        rows=len(units),
        agreement=agreement,
        difference=difference(units),
        low=low,
        high=high,
        only_a=[row.id for row in only_a],
        only_b=[row.id for row in only_b],
    )


def _above(units: Sequence[tuple[LabelledRow, tuple[float, float]]]) -> list[LabelledRow]:
    """The rows by how much higher A ranks them than B does."""
    places = [ranks([credits[place] for _, credits in units]) for place in (0, 1)]
    order = sorted(range(len(units)), key=lambda at: places[1][at] - places[0][at])
    return [units[at][0] for at in order]
