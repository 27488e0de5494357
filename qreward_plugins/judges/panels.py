"""Defines `PanelJudge`: several judges score a sample, and their rewards become one.

A panel of small judges from several families agrees with people better than one large judge, and favours no family
(Verga et al., Replacing Judges with Juries, 2404.18796).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ..config.judge_models import JudgeConfig
from ..config.nodes import JudgeName, Number, PositiveFloat, no_bool, refuse_repeated
from ..errors import ConfigurationError, Mistake
from ..samples import Failed, Sample, Verdict
from .base import Ask, Judge, Opening, together
from .parts import (
    check_names,
    check_own_names,
    combined,
    component_names,
    correct_at_mistakes,
    in_time,
    mask_mistakes,
    part_failed,
    range_of,
    refuse,
)

DISAGREEMENT = "disagreement"
"""The component with the difference of the highest and the lowest reward of the members."""

_REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "median": median, "min": min}


class PanelJudge(Judge):
    """Asks several judges at once, and reduces their rewards to one."""

    class Config(JudgeConfig):
        """Several judges for the same question: their mean, median, lowest reward, or majority."""

        judges: Annotated[tuple[JudgeName, ...], Field(min_length=2)]
        """The members, at least two. For the same model twice, write two judges with another `seed`."""

        reduce: Literal["mean", "median", "majority", "min"] = "mean"
        """What becomes of their rewards: the `mean` (default), the `median`, the lowest (`min`), or 1 if more members
        call the response correct than incorrect, 0 if fewer do, and 0.5 if as many do (`majority`)."""

        quorum: Annotated[int, Field(ge=1), BeforeValidator(no_bool)] | None = None
        """Fewest members with a reward, at least 1. Default: all. With fewer, the sample has no reward."""

        within_s: PositiveFloat | None = None
        """Longest wait for a member that the quorum can do without. Default: the deadline of the sample, because a
        source that is down may come back."""

        correct_at: Number | None = None
        """The reward from which a response counts as correct. Default: with `majority`, more than 0.5; otherwise
        correctness is not defined."""

        @field_validator("judges")
        @classmethod
        def _differ(cls, judges: tuple[JudgeName, ...]) -> tuple[JudgeName, ...]:
            refuse_repeated(judges, "the judge {} is a member twice; it would give the same answer")
            check_names(judges, "panel")
            return judges

        @model_validator(mode="after")
        def _can_be_met(self) -> PanelJudge.Config:
            if self.quorum is not None and self.quorum > len(self.judges):
                raise ValueError(f"the quorum, {self.quorum}, is above the number of members, {len(self.judges)}")
            if self.within_s is not None and self.quorum in (None, len(self.judges)):
                raise ValueError("within_s is for members that a quorum can do without, and this panel needs all")
            return self

    @classmethod
    def open(cls, name: str, config: Any, opening: Opening) -> PanelJudge:
        return cls(name, config, [opening.judge(member) for member in config.judges])

    @classmethod
    def summary(cls, config: Any) -> str:
        quorum = "" if config.quorum is None else f", of at least {config.quorum}"
        return f"the {config.reduce} of {', '.join(config.judges)}{quorum}"

    def __init__(self, name: str, config: Config, members: Sequence[Judge]) -> None:
        super().__init__(name)
        self._members = tuple(members)
        self._reduce = config.reduce
        self._quorum = len(self._members) if config.quorum is None else config.quorum
        self._correct_at = config.correct_at
        self._within_s = config.within_s
        names = [member.name for member in members]
        check_own_names(name, names, (DISAGREEMENT,))
        silent = next((member.name for member in members if not member.defines_correct), None)
        if config.reduce == "majority" and silent is not None:
            problem = f"judge {silent} defines no correctness, so it has no vote."
            raise ConfigurationError([Mistake(f"judges.{name}.reduce", problem, "Set its `correct_at`.")])
        forgiven = members if self._quorum < len(self._members) else ()
        masking = [mistake for member in forgiven for mistake in mask_mistakes(f"judges.{name}.judges", name, member)]
        refuse(masking, correct_at_mistakes(self, config.correct_at))

    @property
    def parts(self) -> tuple[Judge, ...]:
        return self._members

    @property
    def reward_range(self) -> tuple[float, float] | None:
        if self._reduce == "majority":
            return 0.0, 1.0
        return range_of(member.reward_range for member in self._members)

    @property
    def defines_correct(self) -> bool:
        return self._correct_at is not None or self._reduce == "majority"

    def component_names(self) -> tuple[str, ...]:
        return component_names(self._members, (DISAGREEMENT,))

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        spare = len(self._members) > self._quorum
        names = [member.name for member in self._members]

        def run(member: Judge) -> Awaitable[Verdict]:
            return in_time(member, sample, ask, self._within_s if spare else None)

        said = await together(self._members, sample, ask, dispensable=names if spare else (), run=run)
        verdicts = {name: each for name, each in said.items() if isinstance(each, Verdict)}
        if len(verdicts) < self._quorum:
            failed = next((name, each) for name, each in said.items() if isinstance(each, Failed))
            raise part_failed(self.name, *failed)
        scores = [verdict.score for verdict in verdicts.values()]
        reward = self._majority(verdicts) if self._reduce == "majority" else _REDUCE[self._reduce](scores)
        correct = reward > 0.5 if self._correct_at is None else reward >= self._correct_at
        own = {DISAGREEMENT: max(scores) - min(scores)}
        return combined(self.name, verdicts, reward, correct=correct if self.defines_correct else None, own=own)

    def _majority(self, verdicts: Mapping[str, Verdict]) -> float:
        votes = sum(1 if verdict.correct else -1 for verdict in verdicts.values())
        return 0.5 + 0.5 * ((votes > 0) - (votes < 0))
