"""Defines `CascadeJudge`: stages from the cheapest to the best; the first that is sure of a sample decides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from ..config.judge_models import JudgeConfig
from ..config.nodes import JudgeName, Node, Number, PositiveFloat, mapping_or_other, refuse_repeated, takes
from ..errors import Mistake
from ..samples import Sample, Verdict
from .base import Ask, Judge, JudgeFailed, Opening
from .parts import (
    asked,
    bar_mistakes,
    check_names,
    check_own_names,
    combined,
    component_names,
    in_time,
    mask_mistakes,
    range_of,
    refuse,
)

STAGE = "stage"
"""The component with the number of the stage that decided, from 1."""


class Sure(Node):
    """The rewards at which a stage is sure."""

    above: Number | None = None
    """The stage decides samples with this reward or more. Default: none."""

    below: Number | None = None
    """The stage decides samples with this reward or less. Default: none."""

    @model_validator(mode="after")
    def _some(self) -> Sure:
        if self.above is None and self.below is None:
            raise ValueError("name `above`, `below` or both; a stage that never decides only costs")
        if self.above is not None and self.below is not None and self.below >= self.above:
            raise ValueError(f"below, {self.below:g}, must be less than above, {self.above:g}")
        return self


Decides = Annotated[
    Annotated[Sure, Tag("mapping")] | Annotated[Literal["positive", "negative", "both"], Tag("other")],
    Discriminator(mapping_or_other),
    takes("`positive`, `negative`, `both`, or a mapping with `above` and `below`"),
]


class Stage(Node):
    """A stage of a cascade."""

    judge: JudgeName
    """The judge of this stage."""

    decides: Decides = "both"
    """Which samples this stage decides: those it calls correct (`positive`), incorrect (`negative`), or `both`
    (default); or those with a reward of `above` or more, or of `below` or less. The last stage decides all that are
    left."""

    within_s: PositiveFloat | None = None
    """Longest wait for this stage, before the next one is asked. Default: the deadline of the sample, which leaves no
    time for the next stage if a source is down."""


class CascadeJudge(Judge):
    """Asks one judge after the other until one of them is sure.

    A stage that fails decides nothing, so the next one is asked. The sample fails if the last stage fails.
    """

    class Config(JudgeConfig):
        """Stages from the cheapest judge to the best one. The first that is sure of a sample decides it, and the others
        are not asked."""

        stages: Annotated[tuple[Stage, ...], Field(min_length=2)]
        """The stages, at least two, in the order in which they are asked: each a mapping, or the name of its judge."""

        @field_validator("stages", mode="before")
        @classmethod
        def _names(cls, stages: Any) -> Any:
            """A name alone is a stage that decides what it can."""
            if not isinstance(stages, (list, tuple)):
                return stages
            return [{"judge": stage} if isinstance(stage, str) else stage for stage in stages]

        @field_validator("stages")
        @classmethod
        def _differ(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
            names = [stage.judge for stage in stages]
            refuse_repeated(names, "the judge {} is a stage twice; it would give the same answer")
            check_names(names, "cascade")
            if stages[-1].within_s is not None:
                raise ValueError("within_s is for an earlier stage; after the last one nobody is asked")
            return stages

    @classmethod
    def open(cls, name: str, config: Any, opening: Opening) -> CascadeJudge:
        return cls(name, config, [opening.judge(stage.judge) for stage in config.stages])

    @classmethod
    def summary(cls, config: Any) -> str:
        return "the first that decides: " + ", ".join(stage.judge for stage in config.stages)

    def __init__(self, name: str, config: Config, judges: Sequence[Judge]) -> None:
        super().__init__(name)
        self._stages = [(judge, stage.decides) for judge, stage in zip(judges, config.stages, strict=True)]
        self._within_s = [stage.within_s for stage in config.stages]
        check_own_names(name, [judge.name for judge in judges], (STAGE,))
        mistakes: list[Mistake] = []
        for number, (judge, decides) in enumerate(self._stages[:-1]):
            place = f"judges.{name}.stages[{number}]"
            mistakes += mask_mistakes(place, name, judge)
            if isinstance(decides, Sure):
                mistakes += bar_mistakes(f"{place}.decides.above", judge, decides.above, "decides")
                mistakes += bar_mistakes(f"{place}.decides.below", judge, decides.below, "decides", below=True)
            elif not judge.defines_correct:
                problem = f"judge {judge.name} defines no correctness, so it cannot decide by it."
                remedy = "Set its `correct_at`, or write {above: ..., below: ...}."
                mistakes.append(Mistake(f"{place}.decides", problem, remedy))
        refuse(mistakes)

    @property
    def parts(self) -> tuple[Judge, ...]:
        return tuple(judge for judge, _ in self._stages)

    @property
    def reward_range(self) -> tuple[float, float] | None:
        return range_of(judge.reward_range for judge in self.parts)

    @property
    def defines_correct(self) -> bool:
        return all(judge.defines_correct for judge, _ in self._stages)

    def component_names(self) -> tuple[str, ...]:
        return component_names(self.parts, (STAGE,))

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        verdicts: dict[str, Verdict] = {}
        *early, (last, _) = self._stages
        for (judge, decides), within_s in zip(early, self._within_s, strict=False):
            with suppress(JudgeFailed):
                verdicts[judge.name] = await in_time(judge, sample, ask, within_s)
                if _is_sure(verdicts[judge.name], decides):
                    for later in self.parts[self.parts.index(judge) + 1 :]:
                        if later.comparing:
                            ask.skip(later)
                    return self._decided(judge, verdicts)
        verdicts[last.name] = await asked(self.name, last, sample, ask)
        return self._decided(last, verdicts)

    def _decided(self, judge: Judge, verdicts: Mapping[str, Verdict]) -> Verdict:
        verdict, own = verdicts[judge.name], {STAGE: 1.0 + self.parts.index(judge)}
        return combined(self.name, verdicts, verdict.score, correct=verdict.correct, own=own, weights={judge.name: 1.0})


def _is_sure(verdict: Verdict, decides: Decides) -> bool:
    # A floor stands for what could not be judged.
    if verdict.failure is not None:
        return False
    if isinstance(decides, Sure):
        high = decides.above is not None and verdict.score >= decides.above
        return high or (decides.below is not None and verdict.score <= decides.below)
    return verdict.correct is not None and decides in ("both", "positive" if verdict.correct else "negative")
