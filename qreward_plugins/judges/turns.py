"""Defines `TurnsJudge`: another judge scores each turn of the policy, and their scores become one.

It is a kind of its own and no key of a judge, so that a language model, a reward model and a function can all judge
turns, and so that the journal keeps the answer on each turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FiniteFloat, model_validator

from ..config.models import JudgeConfig
from ..config.nodes import JudgeName, Number, no_bool
from ..errors import Mistake
from ..samples import Cause, Failed, Message, Sample, Verdict, fits_float32
from .base import Ask, JudgeFailed, reaches
from .parts import Whole, combined, correct_at_mistakes, split, verdicts_of

TURNS = "turns"
"""The component with the number of turns that were judged."""


class TurnsJudge(Whole):
    """Has another judge score each turn of the policy on what was said before it.

    If a turn has no score, the sample has none. A response without turns (`Sample.turns`) is one turn.
    """

    class Config(JudgeConfig):
        """Each turn of the policy is scored by another judge, which sees what was said before it."""

        judge: JudgeName
        """The judge that scores a turn. It sees the turn as the response, and all that was said before as the
        prompt, tool results included."""

        reduce: Literal["mean", "sum", "last", "min"] = "mean"
        """How the scores of the turns become one: their `mean` (default), their `sum`, the `last` one, or the lowest
        (`min`)."""

        discount: Annotated[FiniteFloat, Field(gt=0, le=1), BeforeValidator(no_bool)] = 1.0
        """With `mean` and `sum`, the n-th turn counts `discount` to the power of n, from 0: above 0, at most 1.
        Default: 1, all turns count the same."""

        correct_at: Number | None = None
        """The reward from which a response counts as correct. Default: correctness is not defined."""

        @model_validator(mode="after")
        def _discounts_a_sum(self) -> TurnsJudge.Config:
            if self.discount != 1 and self.reduce not in ("mean", "sum"):
                raise ValueError(f"discount is for `mean` and `sum`; `{self.reduce}` takes the score of one turn")
            return self

    own = (TURNS,)
    _config: Config

    reads_turns = True

    @classmethod
    def tells_steps(cls, config: Any) -> bool:
        return True

    def part_mistakes(self) -> Iterator[Mistake]:
        (judge,) = self._parts
        if judge.comparing:
            problem = f"judge {judge.name} compares siblings, whose turns do not match."
            yield Mistake(f"judges.{self.name}.judge", problem, "Name a judge of single responses.")
        yield from correct_at_mistakes(self, self._config.correct_at)

    @property
    def reward_range(self) -> tuple[float, float] | None:
        return None if self._config.reduce == "sum" else super().reward_range

    @property
    def defines_correct(self) -> bool:
        return self._config.correct_at is not None

    def seen(self, sample: Sample) -> Sequence[Sample]:
        return [turn for _, turn in _turns_of(sample)]

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        (judge,), turns = self._parts, list(_turns_of(sample))
        ends = [end for end, _ in turns]
        begins = asyncio.Lock()

        async def judged(turn: Sample) -> Verdict:
            # The prompt of a turn holds all that was said before. Built in one step of the event loop, those of many
            # turns would hold up all other samples.
            async with begins:
                await asyncio.sleep(0)
            return await judge.judge(turn, ask)

        running = {f"{judge.name}, turn {number}": judged(turn) for number, (_, turn) in enumerate(turns, 1)}
        verdicts, _ = await verdicts_of(self.name, running)
        return self._whole(ends, list(verdicts.values()))

    def _whole(self, ends: Sequence[int], verdicts: Sequence[Verdict]) -> Verdict:
        config, scores = self._config, [verdict.score for verdict in verdicts]
        reward, parts = split(scores, config.reduce, config.discount)
        if not all(map(fits_float32, (reward, *parts))):
            detail = "the sum of the turns is not finite in float32"
            raise JudgeFailed(Failed(Cause.VERDICT, "invalid", detail, judge=self.name))
        numbered = {f"turn {number}": verdict for number, verdict in enumerate(verdicts, start=1)}
        correct = None if config.correct_at is None else reaches(reward, config.correct_at)
        name, below = self._parts[0].name, {key for verdict in verdicts for key in verdict.components}
        means = {
            f"{name}/{key}": fmean(each.components[key] for each in verdicts if key in each.components)
            for key in sorted(below)
        }
        return replace(
            combined(self.name, numbered, reward, correct=correct),
            components={TURNS: float(len(verdicts)), name: fmean(scores)} | means,
            steps=tuple(zip(ends, scores, strict=True)),
            dense=tuple(zip(ends, parts, strict=True)),
        )


def _turns_of(sample: Sample) -> Iterator[tuple[int, Sample]]:
    """Yield each turn of the policy as a sample, with the character of the response after its last one."""
    before: list[Message] = [*sample.messages]
    found = False
    for turn in sample.turns:
        if turn["role"] == "assistant":
            found = True
            content = turn["content"]
            yield (
                turn["end"],
                replace(sample, messages=tuple(before), response=content, prompt=None, response_images=(), turns=()),
            )
        before.append({"role": turn["role"], "content": turn["content"]})
    if not found:
        yield len(sample.response), replace(sample, turns=()) if sample.turns else sample
