"""Defines `GateJudge`: a second judge is asked only if a first, cheap one gives enough."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import model_validator

from ..config.judge_models import JudgeConfig
from ..config.nodes import JudgeName, Number, takes
from ..samples import Sample, Verdict
from .base import Ask, Judge, Opening
from .parts import asked, bar_mistakes, check_names, check_own_names, combined, component_names, range_of, refuse

PASSED = "passed"
"""The component that is 1 for a sample that passed the gate, and 0 for another one."""


class GateJudge(Judge):
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

        otherwise: Annotated[JudgeName | Number, takes("a number, or the name of a judge")] = 0.0
        """The reward of the samples that do not pass, or the judge that gives it. Default: 0."""

        @model_validator(mode="after")
        def _tells_parts_from_components(self) -> GateJudge.Config:
            check_names((self.when, self.then, self.otherwise), "gate")
            return self

    @classmethod
    def open(cls, name: str, config: Any, opening: Opening) -> GateJudge:
        when, then = opening.judge(config.when), opening.judge(config.then)
        otherwise = opening.judge(config.otherwise) if isinstance(config.otherwise, str) else float(config.otherwise)
        return cls(name, config, when, then, otherwise)

    @classmethod
    def summary(cls, config: Any) -> str:
        return f"{config.then} if {config.when} is at least {config.at_least:g}, otherwise {config.otherwise}"

    def __init__(self, name: str, config: Config, when: Judge, then: Judge, otherwise: Judge | float) -> None:
        super().__init__(name)
        self._at_least = config.at_least
        self._when = when
        self._then = then
        self._otherwise = otherwise
        check_own_names(name, [part.name for part in self.parts], (PASSED,))
        refuse(bar_mistakes(f"judges.{name}.at_least", when, config.at_least, "passes"))

    @property
    def parts(self) -> tuple[Judge, ...]:
        last = (self._otherwise,) if isinstance(self._otherwise, Judge) else ()
        return (self._when, self._then, *last)

    @property
    def calls(self) -> int:
        after = [self._then.calls, *([self._otherwise.calls] if isinstance(self._otherwise, Judge) else [])]
        return self._when.calls + max(after)

    @property
    def reward_range(self) -> tuple[float, float] | None:
        end = self._otherwise
        return range_of((self._then.reward_range, end.reward_range if isinstance(end, Judge) else (end, end)))

    @property
    def defines_correct(self) -> bool:
        return self._then.defines_correct or self._when.defines_correct

    def component_names(self) -> tuple[str, ...]:
        return component_names(self.parts, (PASSED,))

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        first = await asked(self.name, self._when, sample, ask)
        verdicts = {self._when.name: first}
        passed = first.score >= self._at_least
        chosen = self._then if passed else self._otherwise
        own = {PASSED: float(passed)}
        for part in self.parts[1:]:
            if part is not chosen and part.comparing:
                ask.skip(part)
        if not isinstance(chosen, Judge):
            # The condition has judged it.
            correct = False if self._then.defines_correct else first.correct
            return combined(self.name, verdicts, chosen, correct=correct, own=own)
        # The same judge may be the condition and the judge of what passes.
        verdict = verdicts.setdefault(
            chosen.name, first if chosen is self._when else await asked(self.name, chosen, sample, ask)
        )
        correct = verdict.correct if passed or verdict.correct is None else False
        correct = correct if self._then.defines_correct else first.correct
        return combined(self.name, verdicts, verdict.score, correct=correct, own=own, weights={chosen.name: 1.0})
