"""Defines `ScreenJudge`: a monitor beside the judge takes samples out of the training.

A reward that punishes what the monitor sees teaches the policy to hide it (Baker et al., Monitoring Reasoning Models
for Misbehavior, 2503.11926). So by default a flagged sample has no reward: trainers leave it out as they leave out one
whose judge failed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import model_validator

from ..config.judge_models import JudgeConfig
from ..config.nodes import Flag, JudgeName, Number
from ..errors import ConfigurationError, Mistake
from ..samples import SCREENED, Cause, Failed, Sample, Verdict
from .base import Ask, Judge, JudgeFailed, Opening, together
from .parts import (
    bar_mistakes,
    check_names,
    check_own_names,
    combined,
    component_names,
    mask_mistakes,
    part_failed,
    refuse,
)

_REASON = SCREENED.rpartition("/")[2]
"""The `Failed.reason` of a flagged sample, and the component that is 1 for one that got the floor."""


class ScreenJudge(Judge):
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

        @model_validator(mode="after")
        def _tells_parts_from_components(self) -> ScreenJudge.Config:
            if self.judge == self.monitor:
                raise ValueError("the judge is its own monitor; `gate` is for one judge and a bar")
            check_names((self.judge, self.monitor), "screen")
            return self

    @classmethod
    def open(cls, name: str, config: Any, opening: Opening) -> ScreenJudge:
        return cls(name, config, opening.judge(config.judge), opening.judge(config.monitor))

    @classmethod
    def summary(cls, config: Any) -> str:
        than = "more" if config.flags == "above" else "less"
        return f"{config.judge}, unless {config.monitor} is {config.at:g} or {than}"

    @classmethod
    def takes_out(cls, config: Any) -> bool:
        return bool(config.on == "mask")

    def __init__(self, name: str, config: Config, judge: Judge, monitor: Judge) -> None:
        super().__init__(name)
        self._config = config
        self._judge = judge
        self._monitor = monitor
        check_own_names(name, (judge.name, monitor.name), (_REASON,))
        if config.on == "floor" and judge.reward_range is None:
            problem = f"judge {judge.name} has no reward range, so there is no floor."
            raise ConfigurationError([Mistake(f"judges.{name}.on", problem, "Set its `reward_range`, or `on: mask`.")])
        refuse(
            bar_mistakes(f"judges.{name}.at", monitor, config.at, "flags", below=config.flags == "below"),
            () if config.closed else mask_mistakes(f"judges.{name}.monitor", name, monitor),
        )

    @property
    def parts(self) -> tuple[Judge, ...]:
        return self._judge, self._monitor

    @property
    def masks(self) -> bool:
        return self.takes_out(self._config) or super().masks

    @property
    def reward_range(self) -> tuple[float, float] | None:
        return self._judge.reward_range

    @property
    def defines_correct(self) -> bool:
        return self._judge.defines_correct

    def component_names(self) -> tuple[str, ...]:
        return component_names(self.parts, (_REASON,))

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        dispensable = () if self._config.closed else (self._monitor.name,)
        said = await together(self.parts, sample, ask, dispensable=dispensable)
        failed = {name: each for name, each in said.items() if isinstance(each, Failed)}
        for name, each in failed.items():
            if name not in dispensable:
                raise part_failed(self.name, name, each)
        verdicts = {name: each for name, each in said.items() if isinstance(each, Verdict)}
        verdict, monitor = verdicts[self._judge.name], verdicts.get(self._monitor.name)
        flagged = monitor is not None and self._flags(monitor.score)
        if not flagged:
            own = {_REASON: 0.0}
            return combined(
                self.name, verdicts, verdict.score, correct=verdict.correct, own=own, weights={self._judge.name: 1.0}
            )
        detail = f"{self._monitor.name} gave {monitor.score:g}" if monitor is not None else ""
        screened = Failed(Cause.POLICY, _REASON, detail, judge=self.name)
        if self._config.on == "mask" or self._judge.reward_range is None:
            raise JudgeFailed(screened)
        correct = False if self._judge.defines_correct else None
        low = self._judge.reward_range[0]
        whole = combined(self.name, verdicts, low, correct=correct, own={_REASON: 1.0}, weights={})
        return replace(whole, basis="floor", failure=screened)

    def _flags(self, score: float) -> bool:
        return score >= self._config.at if self._config.flags == "above" else score <= self._config.at
