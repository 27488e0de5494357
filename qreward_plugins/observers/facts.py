"""Turns an outcome into a flat mapping with the same keys for every sample, and sums many of these up.

Frameworks read the keys of one sample and expect them in all. A key that only scored samples have would break a run
hours later. So every key is always present, with the value None if a failed sample has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, TypeAlias

from ..samples import SCREENED, Failed, Outcome, Scored
from .batch_report import percentile
from .events import short

MOST_COMPONENTS = 1_000
"""Most names of components that are kept: a function may return new names for every sample."""

MOST_DATA_SOURCES = 100
"""Most data sources with metrics of their own, the largest ones: a tracker keeps each name for ever."""

COMPONENT = "score/"
"""Prefix of the keys of components."""


class Facts:
    """Turns outcomes into mappings.

    `components` are the names of components in the judges' configurations. A function judge may return others, which
    are added when they first occur. `defines_correct`: a judge is configured to define correctness, which adds the key
    `acc`; a verdict that defines it adds it, too.
    """

    def __init__(self, components: Iterable[str], *, defines_correct: bool) -> None:
        self._components: dict[str, None] = dict.fromkeys(components)
        self.defines_correct = defines_correct
        """Whether some judge is known to define correctness."""

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components known so far."""
        return tuple(self._components)

    def of(self, outcome: Outcome, data_source: object = None) -> dict[str, Any]:
        """The facts of an outcome, of a sample of this data source.

        `reward` is None for a failed sample, and for one that a monitor took out: that one is not `failed`. `failed`,
        `floor`, `cached` and `cut` are 0.0 or 1.0. `cause` says why the sample has no reward, or why its score is a
        floor ("infra/deadline", "policy/empty"); "" for a judged sample. `weight_version` is that of the verdict.
        `latency_s` is in seconds, `cost_usd` in US dollars. `score/<name>` is a component or None. `acc` is 0.0 or 1.0,
        or None for a failed sample and for a judge that does not define correctness.
        """
        verdict = outcome.verdict if isinstance(outcome, Scored) else None
        failure = outcome.failure
        result = outcome if isinstance(outcome, Failed) else outcome.verdict
        components = verdict.components if verdict is not None else {}
        correct = verdict.correct if verdict is not None else None
        if len(self._components) < MOST_COMPONENTS:
            self._components.update(dict.fromkeys(components))
        self.defines_correct = self.defines_correct or correct is not None
        facts: dict[str, Any] = {
            "data_source": short(data_source) if isinstance(data_source, (str, int)) else "",
            "reward": outcome.reward,
            "failed": float(verdict is None and failure is not None and not failure.screened),
            "floor": float(verdict is not None and verdict.basis == "floor"),
            "cause": failure.label if failure is not None else "",
            "source": result.source,
            "judge": result.judge,
            "weight_version": verdict.weight_version if verdict is not None else "",
            "attempts": float(result.attempts),
            "latency_s": float(result.latency_s),
            "tokens": float(result.usage.total_tokens),
            "cost_usd": float(result.cost_usd),
            "cached": float(verdict is not None and verdict.cached),
            "cut": float(verdict is not None and verdict.cut),
        }
        for name in self._components:
            facts[COMPONENT + name] = float(components[name]) if name in components else None
        if self.defines_correct:
            facts["acc"] = None if correct is None else float(correct)
        return facts


Fact: TypeAlias = Mapping[str, Any]
"""The facts of one outcome."""


@dataclass(frozen=True)
class Metric:
    """A number over many outcomes: the sum of `of`, or its mean."""

    name: str
    of: Callable[[Fact], float]
    mean: bool = False


def _caused(key: str, cause: str) -> Callable[[Fact], float]:
    return lambda fact: float(fact[key] and fact["cause"].partition("/")[0] == cause)


METRICS: tuple[Metric, ...] = (
    Metric("samples", lambda fact: 1.0),
    Metric("failed", lambda fact: fact["failed"]),
    Metric("failed_rate", lambda fact: fact["failed"], mean=True),
    *(Metric(f"failed/{cause}", _caused("failed", cause)) for cause in ("infra", "verdict", "policy")),
    Metric("screened_rate", lambda fact: float(fact["cause"] == SCREENED), mean=True),
    Metric("floor_rate", lambda fact: fact["floor"], mean=True),
    *(Metric(f"floor/{cause}", _caused("floor", cause)) for cause in ("verdict", "policy")),
    Metric("attempts_mean", lambda fact: fact["attempts"], mean=True),
    Metric("tokens", lambda fact: fact["tokens"]),
    Metric("cost_usd", lambda fact: fact["cost_usd"]),
    Metric("cached_rate", lambda fact: fact["cached"], mean=True),
    Metric("cut_rate", lambda fact: fact["cut"], mean=True),
)
"""The sums and means that slime and ROLL log, under these names."""


def summary(facts: Iterable[Fact], groups: Iterable[Hashable] | None = None) -> dict[str, float]:
    """Metrics of many outcomes, from their facts; empty without any.

    Counts and shares cover all of them. Latencies are seconds from submission to outcome. Rewards and components are of
    the samples that have them. `groups` has the group of each outcome, for the share of groups without variance.
    """
    rows = list(facts)
    if not rows:
        return {}
    latencies = [fact["latency_s"] for fact in rows]
    numbers = {
        **{
            metric.name: fmean([metric.of(row) for row in rows]) if metric.mean else math.fsum(map(metric.of, rows))
            for metric in METRICS
        },
        **{f"latency_s/p{share}": percentile(latencies, share / 100) for share in (50, 95, 99)},
        "latency_s/max": max(latencies),
        **_rewards(rows),
    }
    flat = flat_rate(zip(groups, (fact["reward"] for fact in rows), strict=True)) if groups is not None else None
    if flat is not None:
        numbers["flat_rate"] = flat
    answered = [fact["source"] for fact in rows if fact["source"] and fact["reward"] is not None]
    numbers |= {f"source_share/{name}": answered.count(name) / len(answered) for name in sorted(set(answered))}
    for name in dict.fromkeys(key for fact in rows for key in fact if key.startswith(COMPONENT) or key == "acc"):
        numbers |= _mean_of(rows, name)
    return numbers | _by_data_source(rows)


def flat_rate(rewards: Iterable[tuple[Hashable, float | None]]) -> float | None:
    """The share of groups whose rewards are all equal, from pairs of group and reward (None: the sample failed).

    Only groups with at least two rewards count; None without any. A group-based estimator learns nothing from a flat
    group.
    """
    groups: dict[Hashable, list[float]] = {}
    for group, reward in rewards:
        if reward is not None:
            groups.setdefault(group, []).append(reward)
    flat = [len(set(values)) == 1 for values in groups.values() if len(values) > 1]
    return fmean(flat) if flat else None


def _rewards(rows: Sequence[Fact]) -> dict[str, float]:
    rewards = [fact["reward"] for fact in rows if fact["reward"] is not None]
    if not rewards:
        return {}
    shares = {f"reward/p{share}": percentile(rewards, share / 100) for share in (10, 50, 90)}
    spread = {"reward/std": pstdev(rewards), "reward/min": min(rewards), "reward/max": max(rewards)}
    return {"reward/mean": fmean(rewards), **spread, **shares}


def _by_data_source(rows: Sequence[Fact]) -> dict[str, float]:
    by_source: dict[str, list[Fact]] = {}
    for fact in rows:
        by_source.setdefault(fact["data_source"], []).append(fact)
    by_source.pop("", None)
    numbers: dict[str, float] = {}
    for source, part in sorted(by_source.items(), key=lambda item: -len(item[1]))[:MOST_DATA_SOURCES]:
        of_part = {"failed_rate": fmean([fact["failed"] for fact in part])}
        of_part |= _mean_of(part, "reward") | _mean_of(part, "acc")
        numbers |= {f"data/{source}/{name}": value for name, value in of_part.items()}
    return numbers


def _mean_of(rows: Sequence[Fact], name: str) -> dict[str, float]:
    """The mean of a fact over the scored samples that have it, by its name; empty if none has."""
    values = [fact[name] for fact in rows if fact.get(name) is not None and fact["reward"] is not None]
    return {name: fmean(values)} if values else {}
