"""Defines two judges that ask others one after the other. `GateJudge` asks a second one only if a first, cheap one
gives enough. `CascadeJudge` goes from the cheapest to the best; the first that is sure of a sample decides it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from ..config.models import JudgeConfig
from ..config.nodes import JudgeName, Node, Number, PositiveFloat, mapping_or_other, refuse_repeated, takes
from ..errors import Mistake
from ..samples import Sample, Verdict
from .base import Ask, Judge, JudgeFailed, reaches
from .parts import Whole, bar_mistakes, combined, in_time, mask_mistakes, range_of

PASSED = "passed"
"""The component that is 1 for a sample that passed the gate, and 0 for another one."""
STAGE = "stage"
"""The component with the number of the stage that decided, from 1."""


class GateJudge(Whole):
    """Asks a cheap judge first, and another one only if the first gives enough.

    If the first fails, the sample fails: neither `otherwise` nor the second judge would be right.
    """

    class Config(JudgeConfig):
        """A cheap condition before an expensive judge: format before quality, correctness before style. Samples that do
        not pass cost no further call."""

        when: JudgeName
        """The judge that is asked first."""

        at_least: Number
        """The reward of `when` from which a sample passes."""

        then: JudgeName
        """The judge of the samples that pass. Its reward is the reward."""

        otherwise: Number = 0.0
        """The reward of the samples that do not pass. Default: 0."""

    own = (PASSED,)
    _config: Config

    def part_mistakes(self) -> Iterable[Mistake]:
        config = self._config
        return bar_mistakes(f"judges.{self.name}.at_least", self._parts[0], config.at_least, "passes")

    @property
    def calls(self) -> int:
        return self._parts[0].calls + self._parts[1].calls

    @property
    def reward_range(self) -> tuple[float, float] | None:
        return range_of((self._parts[1].reward_range, (self._config.otherwise, self._config.otherwise)))

    @property
    def defines_correct(self) -> bool:
        return any(part.defines_correct for part in self._parts)

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        when, then = self._parts
        first = await self.ask_part(when, sample, ask)
        verdicts = {when.name: first}
        passed = reaches(first.score, self._config.at_least)
        own = {PASSED: float(passed)}
        if not passed:
            self.skip([then], ask)
            # The condition has judged it.
            correct = False if then.defines_correct else first.correct
            return combined(self.name, verdicts, self._config.otherwise, correct=correct, own=own)
        # The same judge may be the condition and the judge of what passes.
        verdicts[then.name] = verdict = first if then is when else await self.ask_part(then, sample, ask)
        correct = verdict.correct if then.defines_correct else first.correct
        return combined(self.name, verdicts, verdict.score, correct=correct, own=own, weights={then.name: 1.0})


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


class CascadeJudge(Whole):
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
            if stages[-1].within_s is not None:
                raise ValueError("within_s is for an earlier stage; after the last one nobody is asked")
            return stages

    own = (STAGE,)
    _config: Config

    @property
    def _early(self) -> Sequence[tuple[Judge, Stage]]:
        """The stages but the last, with their settings."""
        return list(zip(self._parts[:-1], self._config.stages, strict=False))

    def part_mistakes(self) -> Iterator[Mistake]:
        for number, (judge, stage) in enumerate(self._early):
            place, decides = f"judges.{self.name}.stages[{number}]", stage.decides
            yield from mask_mistakes(place, self.name, judge)
            if isinstance(decides, Sure):
                yield from bar_mistakes(f"{place}.decides.above", judge, decides.above, "decides")
                yield from bar_mistakes(f"{place}.decides.below", judge, decides.below, "decides", below=True)
            elif not judge.defines_correct:
                problem = f"judge {judge.name} defines no correctness, so it cannot decide by it."
                remedy = "Set its `correct_at`, or write {above: ..., below: ...}."
                yield Mistake(f"{place}.decides", problem, remedy)

    @property
    def defines_correct(self) -> bool:
        return all(judge.defines_correct for judge in self._parts)

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        verdicts: dict[str, Verdict] = {}
        for number, (judge, stage) in enumerate(self._early, start=1):
            with suppress(JudgeFailed):
                verdicts[judge.name] = await in_time(judge, sample, ask, stage.within_s or math.inf)
                if _is_sure(verdicts[judge.name], stage.decides):
                    self.skip(self._parts[number:], ask)
                    return self._decided(number, verdicts)
        last = self._parts[-1]
        verdicts[last.name] = await self.ask_part(last, sample, ask)
        return self._decided(len(self._parts), verdicts)

    def _decided(self, stage: int, verdicts: Mapping[str, Verdict]) -> Verdict:
        name = self._parts[stage - 1].name
        score, correct = verdicts[name].score, verdicts[name].correct
        own, weights = {STAGE: float(stage)}, {name: 1.0}
        return combined(self.name, verdicts, score, correct=correct, own=own, weights=weights)


def _is_sure(verdict: Verdict, decides: Decides) -> bool:
    # A floor stands for what could not be judged.
    if verdict.failure is not None:
        return False
    if isinstance(decides, Sure):
        high = decides.above is not None and reaches(verdict.score, decides.above)
        return high or (decides.below is not None and reaches(decides.below, verdict.score))
    return verdict.correct is not None and decides in ("both", "positive" if verdict.correct else "negative")
