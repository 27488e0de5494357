"""Lists of responses that a language model scores in one call, in relation to each other.

A judge tells two responses apart better than it gives each a number by itself. A list has one prompt, so the question
is sent once. A group that is longer than a list gets several, which share some responses, the anchors: a judge that is
kinder to one list than to another one is kinder to its anchors, too, so the scores can be moved until these agree.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..config.judge_models import Interval
from ..errors import InvalidReply
from ..samples import RawScore, Sample
from .tasks import AnswerField, Task, mapping_in, number_field, of_each, plain
from .verdicts import excerpt, number_in

_ANCHORS = 4
"""One of so many places in a list is for an anchor."""
_DIGITS = 9


@dataclass(frozen=True, slots=True)
class ListSample(Sample):
    """Stands for several samples of one prompt. `response` is all `responses` in their order."""

    responses: tuple[str, ...] = ()

    @classmethod
    def of(cls, sample: Sample, responses: Sequence[str]) -> ListSample:
        """Several responses to the prompt of `sample`."""
        shared = {field.name: getattr(sample, field.name) for field in fields(Sample)}
        own: dict[str, Any] = {"response": "\n\n".join(responses), "response_images": ()}
        return cls(**shared | own, responses=tuple(responses))


class ListTask(Task):
    """A score for each of several responses, by their numbers."""

    def __init__(self, score_range: Interval) -> None:
        super().__init__(score_range, ["list", score_range])

    def count(self, sample: Sample) -> int:
        return len(sample.responses) if isinstance(sample, ListSample) else 0

    def told(self, sample: Sample) -> str:
        low, high = map(plain, self.range)
        return (
            f"Compare the {self.count(sample)} responses with each other before you score any. Give a better response "
            f"a higher score, from {low} to {high}, and equal scores only to responses that are equally good. They "
            "stand in an order drawn by chance."
        )

    def fields(self, count: int) -> Mapping[str, AnswerField]:
        return {"scores": of_each([str(number) for number in range(1, count + 1)], number_field(self.range))}

    def read(self, answer: Mapping[str, Any], sample: Sample, source: str) -> RawScore:
        names = [str(number) for number in range(1, self.count(sample) + 1)]
        values = mapping_in("scores", answer, source)
        unknown = [name for name in values if name not in names]
        if unknown:
            told = f"the verdict scores {excerpt(unknown[0])}, but the responses are 1 to {len(names)}"
            raise InvalidReply(f"{told}: {excerpt(source)}")
        scores = {name: number_in(name, values, self.range, source) for name in names}
        # A mean of floats may round to a number outside of the range.
        return RawScore(min(max(math.fsum(scores.values()) / len(names), self.range[0]), self.range[1]), scores)


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
