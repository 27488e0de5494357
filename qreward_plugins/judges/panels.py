"""Defines `PanelJudge` and `ScreenJudge`, which ask several judges at once: members whose rewards become one, and a
monitor beside a judge that takes samples out of the training.

A panel of small judges from several families agrees with people better than one large judge, and favours no family
(Verga et al., Replacing Judges with Juries, 2404.18796). A reward that punishes what a monitor sees teaches the policy
to hide it (Baker et al., Monitoring Reasoning Models for Misbehavior, 2503.11926). So by default a flagged sample has
no reward: trainers leave it out as they leave out one whose judge failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ..config.models import JudgeConfig
from ..config.nodes import Flag, JudgeName, Number, PositiveFloat, no_bool, refuse_repeated
from ..errors import Mistake
from ..samples import SCREENED, Cause, Failed, Sample, Verdict
from .base import Ask, JudgeFailed, reaches
from .parts import Whole, bar_mistakes, combined, correct_at_mistakes, mask_mistakes, part_failed

DISAGREEMENT = "disagreement"
"""The component with the difference of the highest and the lowest reward of the members."""

_REASON = SCREENED.rpartition("/")[2]
"""The `Failed.reason` of a flagged sample, and the component that is 1 for one that got the floor."""

_REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "median": median, "min": min}


class PanelJudge(Whole):
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
            return judges

        @model_validator(mode="after")
        def _can_be_met(self) -> PanelJudge.Config:
            if self.quorum is not None and self.quorum > len(self.judges):
                raise ValueError(f"the quorum, {self.quorum}, is above the number of members, {len(self.judges)}")
            if self.within_s is not None and self.quorum in (None, len(self.judges)):
                raise ValueError("within_s is for members that a quorum can do without, and this panel needs all")
            return self

    own = (DISAGREEMENT,)
    _config: Config

    def part_mistakes(self) -> Iterator[Mistake]:
        place = f"judges.{self.name}"
        silent = next((member.name for member in self._parts if not member.defines_correct), None)
        if self._config.reduce == "majority" and silent is not None:
            problem = f"judge {silent} defines no correctness, so it has no vote."
            yield Mistake(f"{place}.reduce", problem, "Set its `correct_at`.")
        for member in self._parts if self._quorum < len(self._parts) else ():
            yield from mask_mistakes(f"{place}.judges", self.name, member)
        yield from correct_at_mistakes(self, self._config.correct_at)

    @property
    def _quorum(self) -> int:
        return self._config.quorum or len(self._parts)

    @property
    def reward_range(self) -> tuple[float, float] | None:
        return (0.0, 1.0) if self._config.reduce == "majority" else super().reward_range

    @property
    def defines_correct(self) -> bool:
        return self._config.correct_at is not None or self._config.reduce == "majority"

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        config = self._config
        spare = [member.name for member in self._parts] if self._quorum < len(self._parts) else []
        within_s = dict.fromkeys(spare, config.within_s)
        verdicts, failures = await self.ask_parts(sample, ask, dispensable=spare, within_s=within_s)
        if len(verdicts) < self._quorum:
            raise part_failed(self.name, *next(iter(failures.items())))
        scores = [verdict.score for verdict in verdicts.values()]
        reward = _majority(verdicts) if config.reduce == "majority" else _REDUCE[config.reduce](scores)
        correct = reward > 0.5 if config.correct_at is None else reaches(reward, config.correct_at)
        own = {DISAGREEMENT: max(scores) - min(scores)}
        return combined(self.name, verdicts, reward, correct=correct if self.defines_correct else None, own=own)


def _majority(verdicts: Mapping[str, Verdict]) -> float:
    votes = sum(1 if verdict.correct else -1 for verdict in verdicts.values())
    return 0.5 + 0.5 * ((votes > 0) - (votes < 0))


class ScreenJudge(Whole):
    """Asks a judge and a monitor at once, and takes out what the monitor flags."""

    class Config(JudgeConfig):
        """A monitor beside a judge, for reward hacking or unwanted content. A flagged sample is left out of the
        training, or gets a floor."""

        judge: JudgeName
        """The judge of the samples that are not flagged. Its reward is the reward."""

        monitor: JudgeName
        """The judge that flags samples."""

        flags: Literal["above", "below"] = "above"
        """Whether the monitor flags with rewards of `at` or more (`above`, default), or of `at` or less (`below`)."""

        at: Number
        """The reward of the monitor from which it flags."""

        on: Literal["mask", "floor"] = "mask"
        """What a flagged sample gets. `mask` (default): no reward (`policy/screened`). `floor`: the low end of the
        judge's reward range."""

        closed: Flag = False
        """Whether a monitor that fails takes the sample out, too. Default: false, and the sample gets its reward."""

    own = (_REASON,)
    _config: Config

    @classmethod
    def takes_out(cls, config: Any) -> bool:
        return bool(config.on == "mask")

    def part_mistakes(self) -> Iterator[Mistake]:
        config, (judge, monitor), place = self._config, self._parts, f"judges.{self.name}"
        if config.on == "floor" and judge.reward_range is None:
            problem = f"judge {judge.name} has no reward range, so there is no floor."
            yield Mistake(f"{place}.on", problem, "Set its `reward_range`, or `on: mask`.")
        yield from bar_mistakes(f"{place}.at", monitor, config.at, "flags", below=config.flags == "below")
        if not config.closed:
            yield from mask_mistakes(f"{place}.monitor", self.name, monitor)

    @property
    def masks(self) -> bool:
        return self.takes_out(self._config) or super().masks

    @property
    def reward_range(self) -> tuple[float, float] | None:
        return self._parts[0].reward_range

    @property
    def defines_correct(self) -> bool:
        return self._parts[0].defines_correct

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        judge, monitor = self._parts
        dispensable = () if self._config.closed else (monitor.name,)
        verdicts, _ = await self.ask_parts(sample, ask, dispensable=dispensable)
        verdict, seen = verdicts[judge.name], verdicts.get(monitor.name)
        if seen is None or not self._flags(seen.score):
            score, weights = verdict.score, {judge.name: 1.0}
            return combined(self.name, verdicts, score, correct=verdict.correct, own={_REASON: 0.0}, weights=weights)
        screened = Failed(Cause.POLICY, _REASON, f"{monitor.name} gave {seen.score:g}", judge=self.name)
        if self._config.on == "mask" or judge.reward_range is None:
            raise JudgeFailed(screened)
        correct = False if judge.defines_correct else None
        low = judge.reward_range[0]
        whole = combined(self.name, verdicts, low, correct=correct, own={_REASON: 1.0}, weights={})
        return replace(whole, basis="floor", failure=screened)

    def _flags(self, score: float) -> bool:
        at = self._config.at
        return reaches(score, at) if self._config.flags == "above" else reaches(at, score)
