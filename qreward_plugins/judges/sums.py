"""The sum of several judges' rewards for one sample, as pure as a judge: outcomes in, an outcome out.

A sum asks nobody. Its parts are ordinary judges, whose requests go their ordinary way, each with its own sources,
floors and place in the journal; so their verdicts are good for any weights, and for several sums. What is left for the
sum is arithmetic, and the one rule that makes it trustworthy: a reward that is missing is never counted as zero.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..config import models as configuration
from ..errors import ConfigurationError, Mistake
from ..samples import Cause, Failed, Outcome, Scored, Usage, Verdict, fits_float32
from .base import Judge


class JudgeSum:
    """The weighted sum of what several judges say of a sample.

    `parts` are the judges that are added, in the order of the weights, and `nodes` is how judges are configured, by
    name. Raises `ConfigurationError` for a `correct_at` that is outside of what the sum can be.
    """

    def __init__(
        self,
        name: str,
        config: configuration.SumJudge,
        *,
        parts: Sequence[Judge],
        nodes: Mapping[str, configuration.Judge],
    ) -> None:
        self.name = name
        self.parts = tuple(parts)
        self._weights = config.weights
        self._correct_at = config.correct_at
        _check_correct_at(name, config, nodes)

    def component_names(self) -> tuple[str, ...]:
        """Every part by its name, and its own components as `<part>/<component>`, as far as they are known
        beforehand.
        """
        return tuple(
            name
            for part in self.parts
            for name in (part.name, *(_below(part.name, component) for component in part.component_names()))
        )

    def outcome(self, outcomes: Mapping[str, Outcome]) -> Outcome | None:
        """What the outcomes of parts, by name, come to; None while that depends on outcomes that are still to come.

        A part without a reward decides at once: the sum has none either, for that part's cause. A floor counts as its
        part's reward, but the sum stays a failure, and is that failure's floor.
        """
        told = {part.name: outcomes[part.name] for part in self.parts if part.name in outcomes}
        failed = {name: outcome for name, outcome in told.items() if isinstance(outcome, Failed)}
        for name, outcome in failed.items():
            if outcome.reward is None:
                return self._failed({name: outcome}, told.values())
        if len(told) < len(self.parts):
            return None
        reward = self._reward({name: outcome.reward or 0.0 for name, outcome in told.items()})
        if reward is None:
            detail = "it is too large for a number; give smaller weights"
            return self._failed({"the weighted sum": Failed(Cause.VERDICT, "invalid", detail)}, told.values())
        if failed:
            return self._failed(failed, told.values(), floor=reward)
        return self._scored(reward, {name: out.verdict for name, out in told.items() if isinstance(out, Scored)})

    def _reward(self, rewards: Mapping[str, float]) -> float | None:
        """The weighted sum; None: it is not finite in float32, which trainers hold."""
        try:
            reward = math.fsum(self._weights[name] * reward for name, reward in rewards.items())
        except (OverflowError, ValueError):
            return None
        return reward if fits_float32(reward) else None

    def _scored(self, reward: float, verdicts: Mapping[str, Verdict]) -> Scored:
        components: dict[str, float] = {}
        for name, verdict in verdicts.items():
            components[name] = verdict.score
            components |= {_below(name, component): value for component, value in verdict.components.items()}
        said = {name: verdict.rationale for name, verdict in verdicts.items() if verdict.rationale}
        return Scored(
            Verdict(
                score=reward,
                components=components,
                rationale="\n".join(f"{name}: {rationale}" for name, rationale in said.items()),
                correct=None if self._correct_at is None else reward >= self._correct_at,
                judge=self.name,
                source=_beside(verdict.source for verdict in verdicts.values()),
                model=_beside(verdict.model for verdict in verdicts.values()),
                cached=all(verdict.cached for verdict in verdicts.values()),
                returned=_only_one(verdict.returned for verdict in verdicts.values()),
                cut=any(verdict.cut for verdict in verdicts.values()),
                **_spent(verdicts.values()),
            )
        )

    def _failed(
        self, failed: Mapping[str, Failed], outcomes: Iterable[Outcome], *, floor: float | None = None
    ) -> Failed:
        """The failure of the sum, for the cause of the first of `failed`."""
        first = next(iter(failed.values()))
        return Failed(
            first.cause,
            first.reason,
            "; ".join(f"{name}: {outcome.detail or outcome.reason}" for name, outcome in failed.items()),
            floor=floor,
            judge=self.name,
            source=first.source,
            **_spent([outcome.verdict if isinstance(outcome, Scored) else outcome for outcome in outcomes]),
        )


def _below(part: str, component: str) -> str:
    return f"{part}/{component}"


def _beside(names: Iterable[str]) -> str:
    # Sorted, so that a metric that counts them does not tell "a+b" from "b+a".
    return "+".join(sorted({name for name in names if name}))


def _only_one(mappings: Iterable[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """What the one function among the parts returned beside its score, which is not the sum's."""
    told = [mapping for mapping in mappings if mapping is not None]
    return {key: value for key, value in told[0].items() if key != "score"} if len(told) == 1 else None


def _spent(parts: Collection[Verdict | Failed]) -> dict[str, Any]:
    """What the parts took together. They were handed in at one moment, so the longest of them is the time of all."""
    return {
        "attempts": sum(part.attempts for part in parts),
        "usage": sum((part.usage for part in parts), Usage()),
        "latency_s": max((part.latency_s for part in parts), default=0.0),
        "cost_usd": math.fsum(part.cost_usd for part in parts),
    }


def _check_correct_at(name: str, config: configuration.SumJudge, nodes: Mapping[str, configuration.Judge]) -> None:
    """Refuse what `number_mistakes` refuses of a single judge, where the range of every part is known."""
    low = high = 0.0
    for part, weight in config.weights.items():
        interval = getattr(nodes[part], "reward_range", None)
        if interval is None:
            return
        ends = sorted((weight * interval[0], weight * interval[1]))
        low, high = low + ends[0], high + ends[1]
    slack = 1e-9 * max(abs(low), abs(high))
    if config.correct_at is not None and not low - slack <= config.correct_at <= high + slack:
        problem = f"{config.correct_at:g} is outside of what the sum can be, {low:g} to {high:g}."
        raise ConfigurationError(
            [Mistake(f"judges.{name}.correct_at", problem, "It is compared with the weighted sum.")]
        )
