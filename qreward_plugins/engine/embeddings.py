"""Embeddings of texts, for callers that want the vectors themselves.

A server takes many texts in one request, so the texts are sent in lists, and equal texts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import InvalidReply, TextFailed
from ..samples import Message, Sample
from ..scheduling.calls import Call, Unanswered
from ..sources import VECTORS, Reply, Request
from .followed_calls import CallingMethods, answers_of, text_failed

TEXTS_A_REQUEST = 32
"""What text-embeddings-inference takes by default."""
_OF_ALL = ("deadline", "closed", "cancelled", "budget")
"""Reasons that are no fault of a text."""
NAME = "embed"
"""The name of the calls in events, where others have the name of their judge."""

Vector = list[float]


class EmbeddingMethods(CallingMethods):
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
        `TEXTS_A_REQUEST` at a time, equal ones once; a list that is refused is asked for in halves. Otherwise as
        `embed`; raises `TypeError` for a single text.
        """
        if isinstance(texts, str):
            raise TypeError("texts must be several texts; embed takes one")
        given, lack = list(texts), "gives no embeddings; it needs `kind: embeddings`"
        dispatcher, batch, able, due_at = await self._calling(sources, VECTORS, lack, deadline_s, priority)
        sent = list(dict.fromkeys(text for text in given if isinstance(text, str) and text))
        parts = [sent[start : start + TEXTS_A_REQUEST] for start in range(0, len(sent), TEXTS_A_REQUEST)]
        found: dict[str, Vector | TextFailed] = {}
        while parts:
            results = await answers_of(dispatcher, batch, [_asking(able, part) for part in parts], due_at)
            asked, parts = parts, []
            for part, result in zip(asked, results, strict=True):
                if not isinstance(result, Unanswered):
                    found |= zip(part, result.value, strict=True)
                elif len(part) > 1 and result.reason not in _OF_ALL:
                    # One text may be too long, or the server take fewer of them.
                    parts += [part[: len(part) // 2], part[len(part) // 2 :]]
                else:
                    found |= dict.fromkeys(part, text_failed(result))
        no_text = text_failed(Unanswered("input", "it is no text, or an empty one"))
        texts_found = (found[text] if isinstance(text, str) and text else no_text for text in given)
        return [each if isinstance(each, TextFailed) else list(each) for each in texts_found]


def _asking(sources: tuple[str, ...], texts: Sequence[str]) -> Call[list[Vector]]:
    messages = tuple(Message(role="user", content=text) for text in texts)

    def read(request: Request, reply: Reply) -> list[Vector]:
        if not isinstance(reply.value, list) or len(reply.value) != len(texts):
            raise InvalidReply(f"the reply does not hold one embedding for each of {len(texts)} texts")
        vectors: list[Vector] = reply.value
        return vectors

    return Call(sources, lambda attempt: Request(Sample([], ""), messages, judge=NAME), read, NAME)
