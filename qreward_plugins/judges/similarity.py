"""Defines `SimilarityJudge`: how near a response is to the ground truth, by the cosine of their embeddings. Of several
ground truths, the nearest counts.

A model of embeddings gets no instructions, so there is no fence. Control tokens are neutralised, as for a reward model.
It measures what texts are about rather than whether they are right: "the answer is 4" is near "the answer is 5".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

from ..config.models import AskingConfig, Interval
from ..errors import InputError, InvalidReply
from ..samples import Cause, Failed, Message, RawScore, Sample, Verdict
from ..sources.base import Reply, Request
from ..sources.kind import VECTORS
from .base import Opening
from .fence import is_blank, neutralise
from .leaf import Leaf, fingerprint
from .verdicts import Scale
from .views import ShowResponse, View, reference_text


class SimilarityJudge(Leaf):
    """The cosine of the embeddings of the response and of the ground truth."""

    class Config(AskingConfig):
        """The cosine of the embeddings of the response and of the ground truth (a source of kind `embeddings`)."""

        reward_range: Interval = (0.0, 1.0)
        """The range that the cosine is mapped to, linearly. Default: 0 to 1."""

        score_range: Interval = (0.0, 1.0)
        """The cosines that become the ends of the reward range; one beyond them becomes the nearer end. Models
        differ in what they give unrelated texts: look at the component `cosine`. Default: 0 to 1."""

        show: ShowResponse = ShowResponse()
        """What of the response counts. The prompt is not sent. Default: all but the thoughts with which it begins."""

    asks = VECTORS

    def __init__(self, name: str, config: Config, opening: Opening) -> None:
        super().__init__(name, config, sources=opening.sources, fingerprint=fingerprint("similarity"))
        self._config = config
        self._view = View(name, config.show)
        self.extract = self._view.extract
        self._scale = Scale(config.score_range, config.reward_range)

    def screen(self, sample: Sample) -> Verdict | None:
        """Return the floor if nothing is shown of the response."""
        response: object = sample.response
        if isinstance(response, str) and is_blank(self._view.of(sample).response):
            return self.instead(Failed(Cause.POLICY, "empty", self._view.emptiness(response), judge=self.name))
        return None

    def request(self, sample: Sample, *, attempt: int) -> Request:
        truth = sample.ground_truth
        references = [reference_text(each) or "" for each in (truth if isinstance(truth, (list, tuple)) else [truth])]
        if not references or any(map(is_blank, references)):
            raise InputError("the sample has no ground truth, with which its response is compared")
        texts = (neutralise(text) for text in (self._view.of(sample).response, *references))
        messages = tuple(Message(role="user", content=text) for text in texts)
        return Request(sample=sample, messages=messages, judge=self.name)

    def verdict(self, request: Request, reply: Reply) -> Verdict:
        """Read the vectors. Raises `InvalidReply`."""
        vectors = reply.value
        if not isinstance(vectors, list) or len(vectors) != len(request.messages):
            raise InvalidReply(f"the reply does not hold one embedding for each of {len(request.messages)} texts")
        shown, *references = vectors
        return self.mapped(RawScore(max(_cosine(shown, reference) for reference in references), {}))

    def mapped(self, raw: RawScore) -> Verdict:
        low, high = self._config.score_range
        return self.verdict_with(self._scale.reward(min(max(raw.score, low), high)), {"cosine": raw.score}, raw=raw)

    def component_names(self) -> tuple[str, ...]:
        return ("cosine",)


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    length = math.hypot(*one) * math.hypot(*other)
    if not 0 < length < math.inf:
        raise InvalidReply("an embedding has no direction: its length is 0 or too large")
    return min(max(math.fsum(map(mul, one, other)) / length, -1.0), 1.0)
