"""Defines `SumJudge`: the weighted sum of several judges' rewards for one sample.

The judges of a sum run at the same time, each with its own sources, floors and records. So their recorded verdicts can
be used again with other weights and in other sums. A missing reward never counts as zero: when one judge fails, the sum
fails at once, and the other judges are cancelled. Only a part that is `optional` may be missing; the others then share
its weight, so that the scale of the sum stays.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from ..config.models import JudgeConfig
from ..config.nodes import Flag, JudgeName, Node, Number, mapping_or_other, takes
from ..errors import Mistake
from ..samples import Cause, Failed, Sample, Verdict, fits_float32
from .base import Ask, Judge, JudgeFailed, reaches
from .leaf import Leaf
from .parts import Whole, combined, correct_at_mistakes, mask_mistakes


def _ascending(schedule: dict[int, float]) -> dict[int, float]:
    steps = list(schedule)
    if steps != sorted(steps):
        raise ValueError(f"the steps must ascend, and {', '.join(map(str, steps))} do not")
    return schedule


_Steps = Annotated[dict[Annotated[int, Field(ge=0)], Number], Field(min_length=1), AfterValidator(_ascending)]

Scheduled = Annotated[
    Annotated[_Steps, Tag("mapping")] | Annotated[Number, Tag("other")],
    Discriminator(mapping_or_other),
    takes("a number, or a mapping of training steps to numbers, such as {0: 1.0, 500: 0.2}"),
]
"""A number, or one that follows the training step: linear between the steps that are named, and constant beyond them.
"""


def at_step(scheduled: float | Mapping[int, float], step: int | None) -> float:
    """The number at a training step. A sample without a step gets that of the first step."""
    if not isinstance(scheduled, Mapping):
        return scheduled
    steps = list(scheduled)
    step = steps[0] if step is None else step
    place = bisect_right(steps, step)
    if place in (0, len(steps)):
        return scheduled[steps[min(place, len(steps) - 1)]]
    before, after = steps[place - 1], steps[place]
    share = (step - before) / (after - before)
    return scheduled[before] + share * (scheduled[after] - scheduled[before])


def _values(scheduled: float | Mapping[int, float]) -> Sequence[float]:
    return list(scheduled.values()) if isinstance(scheduled, Mapping) else [scheduled]


class Part(Node):
    """A part of a sum."""

    weight: Scheduled = 1.0
    """The factor of its reward; a negative one makes it a penalty. It may follow the training step: `{0: 1.0, 500:
    0.2}`. Default: 1."""

    optional: Flag = False
    """Whether the sum goes without this part if its judge fails. The other parts then share its weight. Default: false,
    and the sum is missing."""


def _part(given: Part | float) -> Part:
    return given if isinstance(given, Part) else Part(weight=given)


_Weight = Annotated[
    Annotated[Part, Tag("mapping")] | Annotated[Number, Tag("other")],
    Discriminator(mapping_or_other),
    takes("a number, or a mapping with `weight` and `optional`"),
]


class SumJudge(Whole):
    """The weighted sum of several judges' rewards for one sample.

    `parts` are in the order of the weights, and may be sums. Raises `ConfigurationError` if `correct_at` is outside of
    the rewards that the sum can have.
    """

    class Config(JudgeConfig):
        """Several rewards for one sample: other judges of this configuration score it, and their rewards are added."""

        weights: Annotated[dict[JudgeName, _Weight], Field(min_length=1)]
        """The judges whose rewards are added, by name, each with its factor; a negative factor makes the reward a
        penalty. They may be sums themselves. Every judge scores the sample; if one reward is missing, the sum is
        missing. Instead of a factor, a mapping: `{weight: 0.2, optional: true}`, or `{weight: {0: 1.0, 500: 0.2}}` for
        a factor that follows the training step, linearly between the steps that are named."""

        correct_at: Scheduled | None = None
        """The sum from which a response counts as correct; it may follow the training step, too. Default: correctness
        is not defined."""

        @model_validator(mode="after")
        def _can_be_shared_out(self) -> SumJudge.Config:
            parts = list(map(_part, self.weights.values()))
            optional = [part for part in parts if part.optional]
            if optional and any(weight < 0 for part in parts for weight in _values(part.weight)):
                raise ValueError("a sum with a negative weight has no optional parts: its weights cannot be shared out")
            if all(part.optional for part in parts):
                raise ValueError("one part at least must not be optional")
            return self

    _config: Config

    def __init__(self, name: str, config: Config, parts: Sequence[Judge]) -> None:
        self._weights: Mapping[str, Part] = {f"{name}": _part(given) for name, given in config.weights.items()}
        self._optional = {name for name, part in self._weights.items() if part.optional}
        super().__init__(name, config, parts)

    @property
    def reward_range(self) -> tuple[float, float] | None:
        low = high = 0.0
        for part in self._parts:
            if part.reward_range is None:
                return None
            ends = [weight * end for weight in _values(self._weights[part.name].weight) for end in part.reward_range]
            low, high = low + min(ends), high + max(ends)
        return low, high

    @property
    def defines_correct(self) -> bool:
        return self._config.correct_at is not None

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        verdicts, _ = await self.ask_parts(sample, ask, dispensable=self._optional)
        return self.added(verdicts, sample.step)

    def added(self, verdicts: Mapping[str, Verdict], step: int | None = None) -> Verdict:
        """Add up the verdicts of the parts at a training step. If the reward of a part is a floor, the basis of the sum
        is a floor, too.

        Raises `JudgeFailed` for a sum that is not finite in float32, the type that trainers use.
        """
        ordered = {part.name: verdicts[part.name] for part in self._parts if part.name in verdicts}
        weights = _shared_out({name: at_step(part.weight, step) for name, part in self._weights.items()}, ordered)
        reward = math.fsum(weights[name] * verdict.score for name, verdict in ordered.items())
        if not fits_float32(reward):
            detail = "the weighted sum is not finite in float32; set other weights"
            raise JudgeFailed(Failed(Cause.VERDICT, "invalid", detail, judge=self.name))
        bar = self._config.correct_at
        correct = None if bar is None else reaches(reward, at_step(bar, step))
        return combined(self.name, ordered, reward, correct=correct, weights=weights)

    def part_mistakes(self) -> Iterator[Mistake]:
        """Find parts that may be missing and must not, penalties whose floor is a reward, and bars out of reach."""
        bars = () if self._config.correct_at is None else _values(self._config.correct_at)
        yield from correct_at_mistakes(self, *bars)
        known = [part.reward_range for part in self._parts if part.reward_range is not None]
        scales = {(round(low, 9), round(high, 9)) for low, high in known}
        for part in self._parts:
            place, given = f"judges.{self.name}.weights.{part.name}", self._weights[part.name]
            if given.optional:
                yield from mask_mistakes(place, self.name, part)
            if given.optional and len(scales) > 1:
                problem = "the reward ranges of the parts differ, so the weight of one cannot be shared out."
                yield Mistake(f"{place}.optional", problem, "Give all parts the same `reward_range`, or leave it out.")
            if min(_values(given.weight)) < 0:
                yield from _rewarded_floors(self.name, part)


def _rewarded_floors(whole: str, part: Judge) -> Iterator[Mistake]:
    """Find leaves of a penalty whose floor for invalid replies is not its full penalty."""
    for below in part.parts:
        yield from _rewarded_floors(whole, below)
    floor = part.floor(Cause.VERDICT) if isinstance(part, Leaf) else None
    if floor is not None and part.reward_range is not None and floor < part.reward_range[1]:
        problem = f"{whole} subtracts it, so a response that makes its reply invalid is better off with the floor."
        remedy = f"Set `floor: {part.reward_range[1]:g}`, or leave it out."
        yield Mistake(f"judges.{part.name}.on_invalid", problem, remedy)


def _shared_out(weights: Mapping[str, float], present: Collection[str]) -> Mapping[str, float]:
    """The weights of the parts that are present, which share those of the others."""
    if len(present) == len(weights):
        return weights
    left = math.fsum(weights[name] for name in present)
    factor = math.fsum(weights.values()) / left if left else math.inf
    return {name: factor * weights[name] for name in present}
