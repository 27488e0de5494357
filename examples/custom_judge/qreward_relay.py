"""A kind of judge: a relay, which asks an expensive judge only where cheap ones are not sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from qreward_plugins import Sample, Verdict
from qreward_plugins.judges import Ask, Interval, Judge, JudgeConfig, JudgeFailed, JudgeName, Opening


class RelayJudge(Judge):
    """Asks cheap judges first, and the next one only while the reward is not clear."""

    class Config(JudgeConfig):
        stages: Annotated[tuple[JudgeName, ...], Field(min_length=2)]
        """The judges to ask, one after the other. The last one decides."""

        unclear: Interval = (0.2, 0.8)
        """Rewards between these two leave the decision to the next judge. Default: 0.2 to 0.8."""

    def __init__(self, name: str, config: Config, opening: Opening) -> None:
        super().__init__(name)
        self._stages = [opening.judge(stage) for stage in config.stages]
        self._unclear = config.unclear

    @property
    def parts(self) -> Sequence[Judge]:
        return self._stages

    def component_names(self) -> tuple[str, ...]:
        return ("stage",)

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        *earlier, last = self._stages
        for number, stage in enumerate(earlier, start=1):
            try:
                verdict = await stage.judge(sample, ask)
            except JudgeFailed:
                continue  # without a verdict nothing is clear
            if self._is_clear(verdict):
                return self._as_mine(verdict, number)
        return self._as_mine(await last.judge(sample, ask), len(self._stages))

    def _is_clear(self, verdict: Verdict) -> bool:
        low, high = self._unclear
        return verdict.failure is None and not low < verdict.score < high

    def _as_mine(self, verdict: Verdict, stage: int) -> Verdict:
        return replace(verdict, judge=self.name, components={"stage": float(stage)})
