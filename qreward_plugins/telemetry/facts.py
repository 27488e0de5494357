"""Turns an outcome into a flat mapping with the same keys for every sample, and many of these into summary numbers.

Frameworks read the keys of one sample and expect them in all, so a key that is there only for scored samples would
break a run hours later. Every key is always there; its value is None where a failed sample has none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ..samples import Failed, Outcome, Scored
from .waiting import percentile

MOST_COMPONENTS = 1_000
"""Most names of components that are kept, because a function may make up new ones for every sample."""

COMPONENT = "score/"
"""Prefix of the keys of components."""


class Facts:
    """Turns outcomes into mappings.

    `components` are the names of components that the judges are configured to give. A function judge may return others;
    they are added when they first occur. `defines_correct`: a judge is configured to say of every response whether it
    is correct. The key `acc` is there then, or once a verdict says so.
    """

    def __init__(self, components: Iterable[str], *, defines_correct: bool) -> None:
        self._components: dict[str, None] = dict.fromkeys(components)
        self.defines_correct = defines_correct
        """Whether any judge is known to define correctness; adds the key `acc`."""

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components known so far."""
        return tuple(self._components)

    def of(self, outcome: Outcome) -> dict[str, Any]:
        """The facts of an outcome.

        `failed`, `floor`, `cached` and `cut` are 0.0 or 1.0. `cause` says why the sample failed, or why its score is
        a floor ("infra/deadline", "policy/empty"); "" for one that was judged.
        `latency_s` is in seconds, `cost_usd` in US dollars. `score/<name>` is a component or None. `acc` is 0.0 or 1.0,
        and None for a sample without a reward or of a judge that does not define correctness.
        """
        verdict = outcome.verdict if isinstance(outcome, Scored) else None
        failure = outcome.failure
        told = outcome if isinstance(outcome, Failed) else outcome.verdict
        components = verdict.components if verdict is not None else {}
        correct = verdict.correct if verdict is not None else None
        if len(self._components) < MOST_COMPONENTS:
            self._components.update(dict.fromkeys(components))
        self.defines_correct = self.defines_correct or correct is not None
        facts: dict[str, Any] = {
            "failed": float(verdict is None),
            "floor": float(verdict is not None and verdict.basis == "floor"),
            "cause": failure.label if failure is not None else "",
            "source": told.source,
            "judge": told.judge,
            "attempts": float(told.attempts),
            "latency_s": float(told.latency_s),
            "tokens": float(told.usage.total_tokens),
            "cost_usd": float(told.cost_usd),
            "cached": float(verdict is not None and verdict.cached),
            "cut": float(verdict is not None and verdict.cut),
        }
        for name in self._components:
            facts[COMPONENT + name] = float(components[name]) if name in components else None
        if self.defines_correct:
            facts["acc"] = None if correct is None else float(correct)
        return facts


def summary(facts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Numbers for a metrics board out of the facts of many outcomes; empty where there are none.

    Counts and shares cover all of them; latencies are seconds from submission to outcome; components are means over the
    samples that have them.
    """
    told = list(facts)
    if not told:
        return {}
    causes = Counter(fact["cause"].split("/", 1)[0] for fact in told if fact["failed"])
    floors = Counter(fact["cause"].split("/", 1)[0] for fact in told if fact["floor"])
    latencies = [fact["latency_s"] for fact in told]
    numbers = {
        "samples": float(len(told)),
        "failed": float(sum(causes.values())),
        "failed_rate": sum(causes.values()) / len(told),
        **{f"failed/{cause}": float(causes[cause]) for cause in ("infra", "verdict", "policy")},
        "floor_rate": sum(floors.values()) / len(told),
        **{f"floor/{cause}": float(floors[cause]) for cause in ("verdict", "policy")},
        "attempts_mean": _mean(fact["attempts"] for fact in told),
        **{f"latency_s/p{share}": percentile(latencies, share / 100) for share in (50, 95, 99)},
        "latency_s/max": max(latencies),
        "tokens": float(sum(fact["tokens"] for fact in told)),
        "cost_usd": math.fsum(fact["cost_usd"] for fact in told),
        "cached_rate": _mean(fact["cached"] for fact in told),
        "cut_rate": _mean(fact["cut"] for fact in told),
    }
    sources = Counter(fact["source"] for fact in told if fact["source"] and not fact["failed"])
    for source, count in sorted(sources.items()):
        numbers[f"source_share/{source}"] = count / sources.total()
    for name in dict.fromkeys(key for fact in told for key in fact if key.startswith(COMPONENT) or key == "acc"):
        values = [fact[name] for fact in told if fact.get(name) is not None and not fact["failed"]]
        if values:
            numbers[name] = _mean(values)
    return numbers


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)
