"""Defines `RankJudge`: a language model compares the responses of a group, and their places are the rewards.

A group-based estimator only uses how the samples of a prompt differ, and a judge that sees them side by side tells them
apart better than one that gives each a number by itself. Equal responses share a place, so a group of these costs no
call. A sample without siblings is scored by itself.

A list has one prompt, so the question is sent once. A group that is longer than a list gets several, which share some
responses, the anchors: a judge that is kinder to one list than to another one is kinder to its anchors, too, so the
scores can be moved until these agree.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ..config.models import JudgeConfig
from ..config.nodes import JudgeName, no_bool
from ..errors import Mistake
from ..samples import Cause, Failed, Sample, Verdict
from .base import Ask, GroupJudge, Judge, JudgeFailed
from .llm import LLMJudge
from .parts import Whole, combined, part_failed
from .verdicts import Scale
from .views import ListSample

_ANCHORS = 4
"""One of so many places in a list is for an anchor."""
_DIGITS = 9
SIBLINGS = "siblings"
"""The component with the number of samples that were compared; 1 for one without siblings."""


class RankJudge(Whole, GroupJudge):
    """Compares the responses of a group.

    Siblings that fail, or that go to another judge, get no place. A call that fails costs the samples of its list
    their rewards.
    """

    class Config(JudgeConfig):
        """A language model compares the responses of a group, several in one call. Rewards are their places. Samples of
        a validation, and those without siblings, are judged by themselves."""

        judge: JudgeName
        """The judge of kind `llm` that compares; its instructions, sources and ranges apply. It gives a score, no
        labels, rubric or criteria."""

        list_size: Annotated[int, Field(ge=2, le=32), BeforeValidator(no_bool)] = 8
        """Most responses in one call. A larger group takes several calls, whose lists share some of the responses; with
        2, each response is compared with the same one. Default: 8."""

        rewards: Literal["places", "scores"] = "places"
        """`places` (default): evenly spaced over the judge's reward range, the best at its high end; equal scores share
        a place. `scores`: what the judge gave."""

    own = (SIBLINGS,)
    _config: Config

    def __init__(self, name: str, config: Config, parts: Sequence[Judge]) -> None:
        super().__init__(name, config, parts)
        self._lists = self._judge.for_lists()

    def part_mistakes(self) -> Iterator[Mistake]:
        if not isinstance(self._parts[0], LLMJudge):
            problem = f"judge {self._parts[0].name} is not of kind llm, so it cannot compare responses."
            yield Mistake(f"judges.{self.name}.judge", problem, "Name a judge of kind llm.")

    @property
    def _judge(self) -> LLMJudge:
        (judge,) = self._parts
        assert isinstance(judge, LLMJudge)
        return judge

    async def judge_group(self, samples: Sequence[Sample], ask: Ask) -> Sequence[Verdict | Failed]:
        if len(samples) == 1:
            return [self._whole(await self.ask_part(self._judge, samples[0], ask), 1)]
        results: dict[int, Verdict | Failed] = {}
        responses: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            try:
                _check_same(sample, samples[0])
                verdict = self._judge.screened(sample)
            except JudgeFailed as error:
                results[place] = part_failed(self.name, self._judge.name, error.failed).failed
                continue
            if verdict is None:
                responses.setdefault(self._judge.shown(sample), []).append(place)
            else:
                results[place] = self._whole(verdict, 0)
        # Sorted, so that the same responses make the same lists, in whatever order they came.
        texts = sorted(responses)
        places = [responses[text] for text in texts]
        count = sum(map(len, places))
        for index, told in (await self._compared(samples[places[0][0]], texts, places, ask) if texts else {}).items():
            for place in places[index]:
                results[place] = told if isinstance(told, Failed) else self._whole(told, count)
        return [results[place] for place in range(len(samples))]

    async def _compared(
        self, sample: Sample, texts: Sequence[str], places: Sequence[Sequence[int]], ask: Ask
    ) -> Mapping[int, Verdict | Failed]:
        """What comes of each response, by its index."""
        assert self._judge.reward_range is not None
        scale = Scale((0.0, 1.0), self._judge.reward_range)
        if len(texts) == 1 and self._config.rewards == "scores":
            return {0: await self._asked(self._judge, replace(sample, response=texts[0]), ask)}
        if len(texts) == 1:
            return {0: Verdict(scale.reward(0.5), judge=self._judge.name)}
        lists = lists_of(texts, self._config.list_size, seed=self.name)
        shown_texts = [ListSample.of(sample, [texts[index] for index in each]) for each in lists]
        said = await asyncio.gather(*(self._asked(self._lists, each, ask) for each in shown_texts))
        found: dict[int, Verdict | Failed] = {}
        scored: list[tuple[list[int], Verdict]] = []
        numbers: list[list[float]] = []
        for shown, verdict in zip(lists, said, strict=True):
            if isinstance(verdict, Verdict) and verdict.raw is not None:
                scored.append((shown, verdict))
                numbers.append([verdict.raw.components[str(n)] for n in range(1, len(shown) + 1)])
            else:
                found |= dict.fromkeys(shown, verdict)
        if not scored:
            return found
        scores = merged([shown for shown, _ in scored], numbers)
        shares = shares_of_ranks(scores, {index: len(places[index]) for index in scores})
        for shown, verdict in scored:
            for number, index in enumerate(shown, 1):
                absolute = self._judge.rewarded(scores[index])
                reward = scale.reward(shares[index]) if self._config.rewards == "places" else absolute.score
                rationale = f"(response {number} of {len(shown)}) {verdict.rationale}" if verdict.rationale else ""
                found[index] = replace(verdict, score=reward, correct=absolute.correct, rationale=rationale, raw=None)
        return found

    async def _asked(self, judge: LLMJudge, sample: Sample, ask: Ask) -> Verdict | Failed:
        try:
            return await judge.judge(sample, ask)
        except JudgeFailed as error:
            return part_failed(self.name, self._judge.name, error.failed).failed

    def _whole(self, verdict: Verdict, siblings: int) -> Verdict:
        parts, own = {self._judge.name: verdict}, {SIBLINGS: float(siblings)}
        return combined(self.name, parts, verdict.score, correct=verdict.correct, own=own)


def _check_same(sample: Sample, first: Sample) -> None:
    """Raise `JudgeFailed` if a sample cannot stand in one list with the first of its group."""
    for name in ("messages", "ground_truth"):
        own, shared = getattr(sample, name), getattr(first, name)
        if not (own is shared or _are_equal(own, shared)):
            detail = f"the sample has other {name} than its group, so they cannot be compared"
            raise JudgeFailed(Failed(Cause.INFRA, "input", detail))


def _are_equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:
        # Arrays have no single answer, and other objects of users may raise anything.
        return repr(one) == repr(other)


def lists_of(responses: Sequence[str], size: int, *, seed: str) -> list[list[int]]:
    """Divide responses into lists of at most `size`, as indices in the order in which they are shown. A quarter of each
    list are anchors, the same in all. Order and anchors follow from `seed` and the responses.
    """
    hashed = hashlib.blake2b(json.dumps([seed, *responses]).encode(), digest_size=16)
    rng = random.Random(hashed.digest())
    order = rng.sample(range(len(responses)), len(responses))
    if len(order) <= size:
        return [order]
    anchors = order[: max(1, size // _ANCHORS)]
    others = order[len(anchors) :]
    count = math.ceil(len(others) / (size - len(anchors)))
    lists = [anchors + others[number::count] for number in range(count)]
    return [rng.sample(each, len(each)) for each in lists]


def merged(lists: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> dict[int, float]:
    """Merge the scores of lists into one for each response, by its index. `scores[i][k]` belongs to `lists[i][k]`.

    The scores of each list are moved by one number, after which the mean of the anchors is the same in all.
    """
    given = [dict(zip(*each, strict=True)) for each in zip(lists, scores, strict=True)]
    anchors = set.intersection(*map(set, given)) if len(given) > 1 else set()
    means = [math.fsum(each[index] for index in sorted(anchors)) / (len(anchors) or 1) for each in given]
    whole = math.fsum(means) / len(means)
    found: dict[int, list[float]] = {}
    for each, mean in zip(given, means, strict=True):
        for index, score in each.items():
            found.setdefault(index, []).append(score + (whole - mean))
    # Rounded, so that equal scores stay equal.
    return {index: round(math.fsum(values) / len(values), _DIGITS) for index, values in found.items()}


def shares_of_ranks(scores: Mapping[int, float], counts: Mapping[int, int]) -> dict[int, float]:
    """Map scores to evenly spaced places from 0 (the lowest) to 1. Equal scores share the mean of their places.
    `counts`: how many samples have the response. One alone is at 0.5, as all are if all are equal.
    """
    places: dict[int, float] = {}
    below = 0
    total = sum(counts[index] for index in scores)
    for score in sorted(set(scores.values())):
        equal = [index for index in scores if scores[index] == score]
        count = sum(counts[index] for index in equal)
        places |= dict.fromkeys(equal, (below + (count - 1) / 2) / (total - 1) if total > 1 else 0.5)
        below += count
    return places
