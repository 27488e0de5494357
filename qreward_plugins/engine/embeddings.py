"""Embeddings of texts, for callers that want the vectors themselves.

A server takes many texts in one request, so the texts are sent in lists, and equal texts once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import InvalidReply, TextFailed
from ..samples import Message, Sample
from ..scheduling import Call, Unanswered, Upstream
from ..sources import VECTORS, Reply, Request
from .followed_calls import FollowedCall, able_sources, until_over
from .scoring import Scoring, check_times

TEXTS_A_REQUEST = 64
NAME = "embed"
"""The name of the calls in events, where others have the name of their judge."""

Vector = list[float]


class EmbeddingMethods(ABC):
    """The methods of `RewardEngine` that ask sources of kind `embeddings`."""

    async def embed(
        self, sources: str | Sequence[str], text: str, *, deadline_s: float | None = None, priority: int = 0
    ) -> Vector:
        """Return the embedding of a text.

        `sources` are the names of one or several sources of kind `embeddings`, with the same model. The call goes by
        the limits, priorities, retries and hedges of all calls, and ends within `deadline_s` seconds (default:
        `engine.deadline_s`). The journal neither answers nor records it. Cancelling ends its attempts.

        Raises `TextFailed` if there is no embedding, also for a text that cannot be sent (`input`). Raises
        `EngineError` if the engine is closed, serves another event loop, or has no such source, and `ValueError` for an
        impossible deadline or priority.
        """
        (vector,) = await self.embed_all(sources, [text], deadline_s=deadline_s, priority=priority)
        if isinstance(vector, TextFailed):
            raise vector
        return vector

    async def embed_all(
        self, sources: str | Sequence[str], texts: Iterable[str], *, deadline_s: float | None = None, priority: int = 0
    ) -> list[Vector | TextFailed]:
        """Return the embeddings of several texts; item i is that of text i, or why there is none. They are sent
        `TEXTS_A_REQUEST` at a time, equal ones once. Otherwise as `embed`.
        """
        check_times(deadline_s, priority)
        able = able_sources(sources, self.upstreams, VECTORS, "gives no embeddings; it needs `kind: embeddings`")
        given = list(texts)
        found: dict[Any, Vector | TextFailed] = {}
        sent = list(dict.fromkeys(text for text in given if isinstance(text, str) and text))
        scoring, due_at = await self._ready(deadline_s)
        # Never sealed: it is no batch of samples, and has no report.
        batch, changed = scoring.dispatcher.batches.new((), priority=priority), asyncio.Event()
        calls: list[tuple[list[str], FollowedCall]] = []
        try:
            for start in range(0, len(sent), TEXTS_A_REQUEST):
                part = sent[start : start + TEXTS_A_REQUEST]
                call = FollowedCall(scoring.dispatcher, batch, changed.set)
                call.start(_asking(able, part), due_at)
                calls.append((part, call))
            await until_over([call for _, call in calls], changed)
        finally:
            await asyncio.gather(*(call.aclose() for _, call in calls))
        for part, call in calls:
            if call.answer is not None:
                found.update(zip(part, call.answer.value, strict=True))
            else:
                found.update(dict.fromkeys(part, _failure(call.unanswered or Unanswered("closed"))))
        no_text = _failure(Unanswered("input", "it is no text, or an empty one"))
        return [found[text] if isinstance(text, str) and text else no_text for text in given]

    @property
    @abstractmethod
    def upstreams(self) -> Mapping[str, Upstream]:
        """The sources by name."""

    @abstractmethod
    async def _ready(self, deadline_s: float | None) -> tuple[Scoring, float]: ...


def _asking(sources: tuple[str, ...], texts: Sequence[str]) -> Call[list[Vector]]:
    messages = tuple(Message(role="user", content=text) for text in texts)

    def read(request: Request, reply: Reply) -> list[Vector]:
        if not isinstance(reply.value, list) or len(reply.value) != len(texts):
            raise InvalidReply(f"the reply does not hold one embedding for each of {len(texts)} texts")
        vectors: list[Vector] = reply.value
        return vectors

    return Call(sources, lambda attempt: Request(Sample([], ""), messages, judge=NAME), read, NAME)


def _failure(why: Unanswered) -> TextFailed:
    return TextFailed(why.reason, why.detail, text="", source=why.source, spent=why.spent)
