"""Texts of chat sources and embeddings, for callers that want these themselves: no judge reads them.

A text is one call of the scheduler. A whole one is retried, goes to other sources and is hedged as any call. A stream
is retried until its first piece. After it, an error ends the stream, because a text that was handed out cannot be taken
back.

The source is read as fast as it sends, however slowly the caller reads. So a slow caller holds neither a connection nor
a permit, and is no silence. What it has not read yet is kept, at most `max_reply_bytes` of the source.

A server embeds many texts in one request, so they are sent in lists, and equal texts once.
"""

from __future__ import annotations

import asyncio
import io
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ..config import configured_name
from ..errors import EngineError, InvalidReply, TextFailed
from ..judges.leaf import text_call
from ..samples import Message, Sample
from ..samples.spent import Spent
from ..scheduling.batches import Batch, Member, check_times
from ..scheduling.calls import Answer, Call, Unanswered
from ..scheduling.dispatcher import Dispatcher
from ..scheduling.upstream import Upstream
from ..sources import TEXT, VECTORS, Reply, Request
from .followed_calls import FollowedCall, answers_of

if TYPE_CHECKING:
    from .scoring import Scoring

_LACK = "gives no text; a text needs a chat source"


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """A whole text. `text` is that of all pieces together, `thinking` the thoughts that the server stated apart.

    `first_token_s` is the time from sending the request to its first token, in seconds; None if the reply was not
    streamed. `spent` counts all attempts. Neither text is redacted.
    """

    text: str = field(repr=False)
    thinking: str = field(repr=False)
    source: str
    model: str
    finish_reason: str
    first_token_s: float | None
    spent: Spent

    @classmethod
    def of(cls, answer: Answer[Reply]) -> TextAnswer:
        """Return the text of an answer."""
        reply = answer.value
        ended, first_s = reply.finish_reason, reply.first_token_s
        return cls(reply.text, reply.thinking, answer.source, answer.model, ended, first_s, answer.spent)


Streamed: TypeAlias = "str | TextAnswer | TextFailed"
"""A piece of a text, or how its stream ended."""


TEXTS_A_REQUEST = 32
"""What text-embeddings-inference takes by default."""
_OF_ALL = ("deadline", "closed", "cancelled", "budget")
"""Reasons that are no fault of a text."""
NAME = "embed"
"""The name of the calls in events, where others have the name of their judge."""

Vector = list[float]


class Receiver(FollowedCall):
    """Receives one text from the scheduler. `on_change` is called when a piece or the end has come."""

    def __init__(self, dispatcher: Dispatcher, batch: Batch, on_change: Callable[[], None]) -> None:
        super().__init__(dispatcher, Member(batch))
        self._on_change = on_change
        self._text = io.StringIO(newline="")
        self._taken = 0

    def add(self, piece: str) -> None:
        """Take in a piece of the text."""
        self._text.seek(0, io.SEEK_END)
        self._text.write(piece)
        self._on_change()

    def take(self) -> str:
        """Return what has come since the last time; "" if nothing has."""
        self._text.seek(self._taken)
        piece = self._text.read()
        self._taken += len(piece)
        return piece

    def end(self) -> TextAnswer | TextFailed:
        """What became of the text, once it is `over`."""
        result = self.result.result()
        return TextAnswer.of(result) if isinstance(result, Answer) else text_failed(result, self._text.getvalue())

    def ended(self, result: Answer[Any] | Unanswered) -> None:
        so_far = self._text.getvalue()
        if isinstance(result, Answer):
            if result.value.text.startswith(so_far):
                self._text.seek(0, io.SEEK_END)
                self._text.write(result.value.text[len(so_far) :])
            else:
                detail = f"{result.source}: the whole text is not that of its stream"
                result = Unanswered("broken", detail, source=result.source, spent=result.spent)
        super().ended(result)
        self._on_change()


class TextMethods(ABC):
    """The methods of `RewardEngine` that ask sources for texts and embeddings, which no judge reads."""

    async def complete(
        self,
        sources: str | Sequence[str],
        messages: Sequence[Message],
        *,
        parameters: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> TextAnswer:
        """Ask a chat source for a text, and return it when it is whole.

        `sources` are the names of one or several sources that may answer. `parameters` are further keys of the body, as
        those of a judge (default: `max_tokens` of 1,024). The call goes by the limits, priorities, retries and hedges
        of all calls, and ends within `deadline_s` seconds (default: `engine.deadline_s`). The journal neither answers
        nor records it. Cancelling ends its attempts and frees their permits.

        Raises `TextFailed` if there is no text, also for messages that cannot be sent (`input`). Raises `EngineError`
        if the engine is closed, serves another event loop, or has no such chat source, and `ValueError` for impossible
        parameters, deadline or priority.
        """
        (text,) = await self.complete_all(
            sources, [messages], parameters=parameters, deadline_s=deadline_s, priority=priority
        )
        if isinstance(text, TextFailed):
            raise text
        return text

    async def complete_all(
        self,
        sources: str | Sequence[str],
        conversations: Iterable[Sequence[Message]],
        *,
        parameters: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> list[TextAnswer | TextFailed]:
        """Ask for the texts of several conversations at once; item i is that of conversation i, or the error that it
        came to, which touches no other. Otherwise as `complete`.
        """
        dispatcher, batch, able, due_at = await self._calling(sources, TEXT, _LACK, deadline_s, priority)
        calls = [text_call(able, messages, parameters, name="complete") for messages in conversations]
        results = await answers_of(dispatcher, batch, calls, due_at)
        return [TextAnswer.of(each) if isinstance(each, Answer) else text_failed(each) for each in results]

    async def stream_text(
        self,
        sources: str | Sequence[str],
        messages: Sequence[Message],
        *,
        parameters: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[str, None]:
        """Ask a chat source for a text, and yield the pieces of the text as they come. No judge reads it.

        `sources` are the names of one or several sources that may answer. `parameters` are further keys of the body, as
        those of a judge (default: `max_tokens` of 1,024). The call begins with the first read, goes by the limits,
        priorities and retries of all calls, and ends within `deadline_s` seconds (default: `engine.deadline_s`). The
        journal neither answers nor records it. Thoughts that the server states apart are left out. Pieces that come
        while nobody reads are joined. A source that does not stream gives the whole text as one piece.

        Closing the generator or cancelling its reader ends the call; so a read with a time limit that passes ends the
        stream, and `deadline_s` is the better limit. The connection is closed, and permit and quota are
        given back; `aclose` waits for that. Reading it raises `TextFailed` if the text does not become whole, after all
        pieces that came, also for messages that cannot be sent (`input`). Raises `EngineError` if the engine is closed,
        serves another event loop, or has no such chat source, and `ValueError` for impossible parameters, deadline or
        priority.
        """
        streams = self.stream_texts(
            sources, [messages], parameters=parameters, deadline_s=deadline_s, priority=priority
        )
        async with aclosing(streams):
            async for _, item in streams:
                if isinstance(item, TextFailed):
                    raise item
                if isinstance(item, str):
                    yield item

    async def stream_texts(
        self,
        sources: str | Sequence[str],
        conversations: Iterable[Sequence[Message]],
        *,
        parameters: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[tuple[int, Streamed], None]:
        """Stream the texts for several conversations at once; yields (index of the conversation, piece) as they come.

        The last item of each stream is its `TextAnswer`, or the `TextFailed` that ended it; neither touches the
        other streams. Closing the generator ends all streams. Otherwise as `stream_text`.
        """
        dispatcher, batch, able, due_at = await self._calling(sources, TEXT, _LACK, deadline_s, priority)
        calls = [text_call(able, messages, parameters, name="stream_text") for messages in conversations]
        arrived = asyncio.Event()
        changed: dict[int, None] = {}
        receivers: list[Receiver] = []

        def note(number: int) -> None:
            changed[number] = None
            arrived.set()

        try:
            for number, call in enumerate(calls):
                receiver = Receiver(dispatcher, batch, partial(note, number))
                receivers.append(receiver)
                call.on_text = receiver.add
                receiver.start(call, due_at)
            left = len(receivers)
            while left:
                if not changed:
                    arrived.clear()
                    await arrived.wait()
                number = next(iter(changed))
                del changed[number]
                receiver = receivers[number]
                # Both are read at once: while this yields, more may come, and the stream may end.
                piece, over = receiver.take(), receiver.over
                if piece:
                    yield number, piece
                if over:
                    left -= 1
                    yield number, receiver.end()
        finally:
            await asyncio.gather(*(receiver.aclose() for receiver in receivers))

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

    @property
    @abstractmethod
    def upstreams(self) -> Mapping[str, Upstream]:
        """The sources by name, with their quotas and learned estimates."""

    @abstractmethod
    async def _ready(self, deadline_s: float | None) -> tuple[Scoring, float]: ...

    async def _calling(
        self, sources: str | Sequence[str], answers: str, lack: str, deadline_s: float | None, priority: int
    ) -> tuple[Dispatcher, Batch, tuple[str, ...], float]:
        """Return what calls to the named sources need: dispatcher, batch, upstreams and deadline.

        Raises `EngineError` for an unknown source, and for one that does not give `answers`, which `lack` says;
        `ValueError` without any, and for an impossible deadline or priority.
        """
        check_times(deadline_s, priority)
        scoring, due_at = await self._ready(deadline_s)
        found: dict[str, None] = {}
        for name in (sources,) if isinstance(sources, str) else sources:
            # A source with several keys is as many upstreams.
            meant = [each for each in self.upstreams if name in (each, configured_name(each))]
            if not meant:
                raise EngineError(f"unknown source {name!r}; sources: {', '.join(self.upstreams)}")
            if answers not in (self.upstreams[meant[0]].source.answers or (answers,)):
                raise EngineError(f"source {name!r} {lack}")
            found.update(dict.fromkeys(meant))
        if not found:
            raise ValueError("it needs at least one source")
        batch = scoring.batches.new(priority=priority)
        return scoring.dispatcher, batch, tuple(found), due_at


def text_failed(why: Unanswered, text: str = "") -> TextFailed:
    """Return the error of a call without an answer. `text` is what came of it."""
    return TextFailed(why.reason, why.detail, text=text, source=why.source, spent=why.spent)


def _asking(sources: tuple[str, ...], texts: Sequence[str]) -> Call[list[Vector]]:
    messages = tuple(Message(role="user", content=text) for text in texts)

    def read(request: Request, reply: Reply) -> list[Vector]:
        if not isinstance(reply.value, list) or len(reply.value) != len(texts):
            raise InvalidReply(f"the reply does not hold one embedding for each of {len(texts)} texts")
        vectors: list[Vector] = reply.value
        return vectors

    return Call(sources, lambda attempt: Request(Sample([], ""), messages, judge=NAME), read, NAME)
