"""Defines `SumJudge`: the weighted sum of several judges' rewards for one sample.

The judges of a sum run at the same time, each with its own sources, floors and records. So their recorded verdicts can
be used again with other weights and in other sums. A missing reward never counts as zero: when one judge fails, the sum
fails at once, and the other judges are cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from ..config.judge_models import JudgeConfig
from ..config.nodes import JudgeName, Number
from ..errors import ConfigurationError, Mistake
from ..samples import Cause, Failed, Sample, Verdict, fits_float32
from .base import Ask, Judge, JudgeFailed, Opening, together


def _weighs(weight: float) -> float:
    if weight == 0:
        raise ValueError("a weight of 0 adds nothing; remove the judge from the sum, or set another weight")
    return weight


class SumJudge(Judge):
    """The weighted sum of several judges' rewards for one sample.

    `parts` are in the order of the weights, and may be sums. Raises `ConfigurationError` if the sum can never reach
    `correct_at`, or is always above it.
    """

    class Config(JudgeConfig):
        """Several rewards for one sample: other judges of this configuration score it, and their rewards are added."""

        weights: Annotated[dict[JudgeName, Annotated[Number, AfterValidator(_weighs)]], Field(min_length=1)]
        """The judges whose rewards are added, by name, each with its factor; a negative factor makes the reward a
        penalty. They may be sums themselves. Every judge scores the sample; if one reward is missing, the sum is
        missing."""

        correct_at: Number | None = None
        """The sum from which a response counts as correct. Default: correctness is not defined."""

        @field_validator("weights", mode="before")
        @classmethod
        def _tells_parts_from_components(cls, weights: Any) -> Any:
            parts = [part for part in weights if isinstance(part, str)] if isinstance(weights, Mapping) else []
            mistakes: list[InitErrorDetails] = []
            for part in parts:
                whole = next((other for other in parts if part.startswith(f"{other}/")), None)
                if whole is not None:
                    problem = (
                        f"the name looks like a component of `{whole}`, another part of this sum; rename this judge"
                    )
                    error = PydanticCustomError("like_component", "{problem}", {"problem": problem})
                    mistakes.append({"type": error, "loc": (part,), "input": part})
            if mistakes:
                raise ValidationError.from_exception_data("weights", mistakes)
            return weights

    @classmethod
    def open(cls, name: str, config: Any, opening: Opening) -> SumJudge:
        return cls(name, config, parts=[opening.judge(part) for part in config.weights])

    @classmethod
    def summary(cls, config: Any) -> str:
        return "the sum of " + " and ".join(f"{weight:g} x {part}" for part, weight in config.weights.items())

    def __init__(self, name: str, config: Config, *, parts: Sequence[Judge]) -> None:
        super().__init__(name)
        self._parts = tuple(parts)
        self._weights: Mapping[str, float] = {f"{part}": weight for part, weight in config.weights.items()}
        self._correct_at = config.correct_at
        self._check_correct_at()

    @property
    def parts(self) -> Sequence[Judge]:
        return self._parts

    @property
    def reward_range(self) -> tuple[float, float] | None:
        low = high = 0.0
        for part in self._parts:
            if part.reward_range is None:
                return None
            ends = sorted(self._weights[part.name] * end for end in part.reward_range)
            low, high = low + ends[0], high + ends[1]
        return low, high

    @property
    def defines_correct(self) -> bool:
        return self._correct_at is not None

    def component_names(self) -> tuple[str, ...]:
        """Return the name of each part, and its components as `<part>/<component>`, as far as they are known in
        advance.
        """
        return tuple(
            name
            for part in self._parts
            for name in (part.name, *(_below(part.name, component) for component in part.component_names()))
        )

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        verdicts = await together(self._parts, sample, ask)
        missing = next(((part, result) for part, result in verdicts.items() if isinstance(result, Failed)), None)
        if missing is not None:
            part, failed = missing
            detail = f"{part}: {failed.detail or failed.reason}"
            raise JudgeFailed(replace(failed, detail=detail, judge=self.name))
        return self.added({part: result for part, result in verdicts.items() if isinstance(result, Verdict)})

    def added(self, verdicts: Mapping[str, Verdict]) -> Verdict:
        """Add up the verdicts of all parts. If the reward of a part is a floor, the basis of the sum is a floor, too.

        Raises `JudgeFailed` for a sum that is not finite in float32, the type that trainers use.
        """
        ordered = {part.name: verdicts[part.name] for part in self._parts}
        reward = self._reward({name: verdict.score for name, verdict in ordered.items()})
        if reward is None:
            detail = "the weighted sum is too large for a float32; set smaller weights"
            raise JudgeFailed(Failed(Cause.VERDICT, "invalid", detail, judge=self.name))
        components: dict[str, float] = {}
        for name, verdict in ordered.items():
            components[name] = verdict.score
            components |= {_below(name, component): value for component, value in verdict.components.items()}
        rationales = {name: verdict.rationale for name, verdict in ordered.items() if verdict.rationale}
        failure = _failure({name: verdict.failure for name, verdict in ordered.items() if verdict.failure}, self.name)
        return Verdict(
            reward,
            components=components,
            rationale="\n".join(f"{name}: {rationale}" for name, rationale in rationales.items()),
            correct=None if self._correct_at is None else reward >= self._correct_at,
            judge=self.name,
            source=_beside(verdict.source for verdict in ordered.values()),
            model=_beside(verdict.model for verdict in ordered.values()),
            weight_version=_beside(verdict.weight_version for verdict in ordered.values()),
            basis="judged" if failure is None else "floor",
            failure=failure,
            cached=all(verdict.cached for verdict in ordered.values()),
            cut=any(verdict.cut for verdict in ordered.values()),
            returned=_only_one(verdict.returned for verdict in ordered.values()),
        )

    def _check_correct_at(self) -> None:
        """Check `correct_at` as `number_mistakes` does for a leaf, if the range of every part is known."""
        if self.reward_range is None or self._correct_at is None:
            return
        low, high = self.reward_range
        slack = 1e-9 * max(abs(low), abs(high))
        if not low - slack <= self._correct_at <= high + slack:
            problem = f"{self._correct_at:g} is outside the range of the sum, {low:g} to {high:g}."
            raise ConfigurationError(
                [Mistake(f"judges.{self.name}.correct_at", problem, "It is compared with the weighted sum.")]
            )

    def _reward(self, rewards: Mapping[str, float]) -> float | None:
        try:
            reward = math.fsum(self._weights[name] * reward for name, reward in rewards.items())
        except (OverflowError, ValueError):
            return None
        return reward if fits_float32(reward) else None


def _failure(failures: Mapping[str, Failed], judge: str) -> Failed | None:
    """Merge the failures of the parts that have floors; the cause is that of the first."""
    if not failures:
        return None
    first = next(iter(failures.values()))
    detail = "; ".join(f"{name}: {failed.detail or failed.reason}" for name, failed in failures.items())
    return replace(first, detail=detail, judge=judge)


def _below(part: str, component: str) -> str:
    return f"{part}/{component}"


def _beside(names: Iterable[str]) -> str:
    # Sorted, so that metrics do not count "a+b" and "b+a" as two names.
    return "+".join(sorted({name for several in names for name in several.split("+") if name}))


def _only_one(mappings: Iterable[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return the mapping of the function among the parts, without its score; None unless exactly one part has one."""
    found = [mapping for mapping in mappings if mapping is not None]
    return {key: value for key, value in found[0].items() if key != "score"} if len(found) == 1 else None
