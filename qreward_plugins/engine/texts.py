"""Texts of chat sources, for callers that want the text itself: whole, or in pieces as they come.

A text is one call of the scheduler. A whole one is retried, goes to other sources and is hedged as any call. A stream
is retried until its first piece. After it, an error ends the stream, because a text that was handed out cannot be taken
back.

The source is read as fast as it sends, however slowly the caller reads. So a slow caller holds neither a connection nor
a permit, and is no silence. What it has not read yet is kept, at most `max_reply_bytes` of the source.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ..errors import TextFailed
from ..judges.text_calls import text_call
from ..samples import Message
from ..samples.spent import Spent
from ..scheduling.batches import Batch
from ..scheduling.calls import Answer, Unanswered
from ..scheduling.dispatcher import Dispatcher
from ..sources import TEXT, Reply
from .followed_calls import CallingMethods, FollowedCall, answers_of, text_failed

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


class Receiver(FollowedCall):
    """Receives one text from the scheduler. `on_change` is called when a piece or the end has come."""

    answer: TextAnswer | None

    def __init__(self, dispatcher: Dispatcher, batch: Batch, on_change: Callable[[], None]) -> None:
        super().__init__(dispatcher, batch, on_change)
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
        return self.answer or text_failed(self.unanswered or Unanswered("closed"), self._text.getvalue())

    def _take_answer(self, answer: Answer[Any]) -> None:
        reply: Reply = answer.value
        so_far = self._text.getvalue()
        if not reply.text.startswith(so_far):
            detail = f"{answer.source}: the whole text is not that of its stream"
            self.unanswered = Unanswered("broken", detail, source=answer.source, spent=answer.spent)
            return
        self._text.seek(0, io.SEEK_END)
        self._text.write(reply.text[len(so_far) :])
        self.answer = TextAnswer.of(answer)


class TextMethods(CallingMethods):
    """The methods of `RewardEngine` that ask chat sources for texts. No judge reads these."""

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
