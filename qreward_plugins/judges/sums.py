"""The weighted sum of several judges' rewards for one sample.

The judges of a sum are asked at the same time, each with its own sources, floors and records; so their verdicts are
good for any weights, and for several sums. A reward that is missing is never counted as zero: one judge without a
verdict leaves the sum without one, at once, and the others are cancelled.
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
        raise ValueError("a weight of 0 adds nothing; leave the judge out of the sum, or give it another weight")
    return weight


class SumJudge(Judge):
    """The weighted sum of several judges' rewards for one sample.

    `parts` are in the order of the weights, and may be sums. Raises `ConfigurationError` for a `correct_at` that is
    outside of what the sum can be.
    """

    class Config(JudgeConfig):
        """Several rewards for one sample: other judges of this configuration score it, and what they say is added
        up."""

        weights: Annotated[dict[JudgeName, Annotated[Number, AfterValidator(_weighs)]], Field(min_length=1)]
        """The judges whose rewards are added, by name, and what each reward is multiplied by; a negative weight makes a
        penalty of it. They may be sums themselves. Every one of them scores the sample; the sum is missing where one of
        their rewards is."""

        correct_at: Number | None = None
        """The sum from which on the response counts as correct. Default: the sum says nothing about it."""

        @field_validator("weights", mode="before")
        @classmethod
        def _tells_parts_from_components(cls, weights: Any) -> Any:
            parts = [part for part in weights if isinstance(part, str)] if isinstance(weights, Mapping) else []
            mistakes: list[InitErrorDetails] = []
            for part in parts:
                whole = next((other for other in parts if part.startswith(f"{other}/")), None)
                if whole is not None:
                    said = f"the name reads like a component of `{whole}`, another part of this sum; give it another"
                    error = PydanticCustomError("like_component", "{said}", {"said": said})
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
        """Every part by its name, and its own components as `<part>/<component>`, as far as they are known
        beforehand.
        """
        return tuple(
            name
            for part in self._parts
            for name in (part.name, *(_below(part.name, component) for component in part.component_names()))
        )

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        verdicts = await together(self._parts, sample, ask)
        missing = next(((part, said) for part, said in verdicts.items() if isinstance(said, Failed)), None)
        if missing is not None:
            part, failed = missing
            detail = f"{part}: {failed.detail or failed.reason}"
            raise JudgeFailed(replace(failed, detail=detail, judge=self.name))
        return self.added({part: said for part, said in verdicts.items() if isinstance(said, Verdict)})

    def added(self, verdicts: Mapping[str, Verdict]) -> Verdict:
        """The sum of the verdicts of all parts, by name. A floor counts as its part's reward, and makes the sum one.

        Raises `JudgeFailed` for a sum that is not finite in float32, which trainers hold.
        """
        said = {part.name: verdicts[part.name] for part in self._parts}
        reward = self._reward({name: verdict.score for name, verdict in said.items()})
        if reward is None:
            detail = "the weighted sum: it is too large for a number; give smaller weights"
            raise JudgeFailed(Failed(Cause.VERDICT, "invalid", detail, judge=self.name))
        components: dict[str, float] = {}
        for name, verdict in said.items():
            components[name] = verdict.score
            components |= {_below(name, component): value for component, value in verdict.components.items()}
        rationales = {name: verdict.rationale for name, verdict in said.items() if verdict.rationale}
        failure = _failure({name: verdict.failure for name, verdict in said.items() if verdict.failure}, self.name)
        return Verdict(
            reward,
            components=components,
            rationale="\n".join(f"{name}: {rationale}" for name, rationale in rationales.items()),
            correct=None if self._correct_at is None else reward >= self._correct_at,
            judge=self.name,
            source=_beside(verdict.source for verdict in said.values()),
            model=_beside(verdict.model for verdict in said.values()),
            basis="judged" if failure is None else "floor",
            failure=failure,
            cached=all(verdict.cached for verdict in said.values()),
            cut=any(verdict.cut for verdict in said.values()),
            returned=_only_one(verdict.returned for verdict in said.values()),
        )

    def _check_correct_at(self) -> None:
        """Refuse what `number_mistakes` refuses of a single judge, where the range of every part is known."""
        if self.reward_range is None or self._correct_at is None:
            return
        low, high = self.reward_range
        slack = 1e-9 * max(abs(low), abs(high))
        if not low - slack <= self._correct_at <= high + slack:
            problem = f"{self._correct_at:g} is outside of what the sum can be, {low:g} to {high:g}."
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
    """Why parts have floors, with the cause of the first."""
    if not failures:
        return None
    first = next(iter(failures.values()))
    detail = "; ".join(f"{name}: {failed.detail or failed.reason}" for name, failed in failures.items())
    return replace(first, detail=detail, judge=judge)


def _below(part: str, component: str) -> str:
    return f"{part}/{component}"


def _beside(names: Iterable[str]) -> str:
    # Sorted, so that a metric that counts them does not tell "a+b" from "b+a".
    return "+".join(sorted({name for several in names for name in several.split("+") if name}))


def _only_one(mappings: Iterable[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """What the one function among the parts returned beside its score, which is not the sum's."""
    told = [mapping for mapping in mappings if mapping is not None]
    return {key: value for key, value in told[0].items() if key != "score"} if len(told) == 1 else None
