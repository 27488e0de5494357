"""Texts of chat sources, for callers that want the text itself: whole, or in pieces as they come.

A text is one call of the scheduler. A whole one is retried, goes to other sources and is hedged as any call. A stream
is retried until its first piece. After it, an error ends the stream, because a text that was handed out cannot be taken
back.

The source is read as fast as it sends, however slowly the caller reads. So a slow caller holds neither a connection nor
a permit, and is no silence. What it has not read yet is kept, at most `max_reply_bytes` of the source.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ..errors import EngineError, TextFailed
from ..judges.text_calls import text_call
from ..samples import Message
from ..samples.spent import NOTHING, Spent
from ..scheduling import Answer, Batch, Dispatcher, Unanswered, Upstream
from ..sources import TEXT, Reply
from .followed_calls import CallingMethods, FollowedCall, able_sources, answers_of, text_failed
from .scoring import check_times


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


class TextStream:
    """The pieces of one text, as they come: an asynchronous iterator of texts that are not empty.

    Thoughts that the server states apart are left out. Pieces that come while nobody reads are joined. A source that
    does not stream gives the whole text as one piece. Iterating raises `TextFailed` if the text does not become
    whole, after all pieces that came.

    Leaving early ends the call: `aclose` or the end of an `async with` block, cancelling the task that waits for a
    piece, or dropping the iterator. The connection is closed, and permit and quota are given back. `aclose` waits for
    that.
    """

    def __init__(self, receiver: Receiver, arrived: asyncio.Event) -> None:
        self._receiver = receiver
        self._arrived = arrived
        self._loop = asyncio.get_running_loop()
        self._waiting = False

    @property
    def answer(self) -> TextAnswer | None:
        """The whole text with its usage and attempts; None until it is whole. Pieces may still wait to be read."""
        return self._receiver.answer

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> str:
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError("a text stream is read in the event loop in which it was opened")
        if self._waiting:
            raise EngineError("only one task at a time can read a text stream")
        receiver = self._receiver
        while True:
            self._arrived.clear()
            piece = receiver.take()
            if piece:
                return piece
            if receiver.unanswered is not None:
                raise receiver.failure()
            if receiver.over:
                raise StopAsyncIteration
            self._waiting = True
            try:
                await self._arrived.wait()
            except asyncio.CancelledError:
                receiver.drop("cancelled", "the task that read it was cancelled")
                raise
            finally:
                self._waiting = False

    async def aclose(self) -> None:
        """End the stream. Idempotent. A later read ends at once."""
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError("a text stream is closed in the event loop in which it was opened")
        await self._receiver.aclose()

    async def __aenter__(self) -> TextStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The garbage collector may run in any thread.
        receiver: Receiver | None = getattr(self, "_receiver", None)
        if receiver is not None and not receiver.over:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it everything
                self._loop.call_soon_threadsafe(receiver.drop)


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

    def failure(self) -> TextFailed:
        """The error of a stream that is `unanswered`."""
        return text_failed(self.unanswered or Unanswered("closed"), self._text.getvalue())

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

    def drop(self, reason: str = "", detail: str = "") -> None:
        """End the call, because nobody wants the text any more. With a `reason`, later reads raise it."""
        if reason and not self.over:
            job = self._job
            spent = NOTHING if job is None else job.spent(self._dispatcher.now())
            self.unanswered = Unanswered(reason, detail, source="" if job is None else job.last_source, spent=spent)
        super().drop()

    async def aclose(self) -> None:
        self.take()
        await super().aclose()


class _Asking:
    """Makes the calls of one batch of texts, over the chat sources that the caller named. `name`: that of the calls in
    events, where others have the name of their judge.

    Raises `EngineError` for a source that does not exist or gives no text, and `ValueError` for `parameters` that a
    source sets itself.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        upstreams: Mapping[str, Upstream],
        sources: str | Sequence[str],
        parameters: Mapping[str, Any] | None,
        *,
        priority: int,
        name: str,
    ) -> None:
        able = able_sources(sources, upstreams, TEXT, "gives no text; a text needs a chat source")
        self.dispatcher = dispatcher
        self.call = partial(text_call, able, parameters=parameters or {}, name=name)
        # Never sealed: it is no batch of samples, and has no report.
        self.batch = dispatcher.batches.new((), priority=priority)

    def received(self, messages: Sequence[Message], due_at: float, on_change: Callable[[], None]) -> Receiver:
        """Ask for the text that follows `messages`."""
        call = self.call(messages)
        receiver = Receiver(self.dispatcher, self.batch, on_change)
        call.on_text = receiver.add
        receiver.start(call, due_at)
        return receiver


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
        check_times(deadline_s, priority)
        scoring, due_at = await self._ready(deadline_s)
        asking = _Asking(scoring.dispatcher, self.upstreams, sources, parameters, priority=priority, name="complete")
        calls = [asking.call(messages) for messages in conversations]
        results = await answers_of(scoring.dispatcher, asking.batch, calls, due_at)
        return [TextAnswer.of(each) if isinstance(each, Answer) else text_failed(each) for each in results]

    def stream_text(
        self,
        sources: str | Sequence[str],
        messages: Sequence[Message],
        *,
        parameters: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> TextStream:
        """Ask a chat source for a text, and return the pieces of the text as they come. No judge reads it.

        `sources` are the names of one or several sources that may answer. `parameters` are further keys of the body, as
        those of a judge (default: `max_tokens` of 1,024). The call begins at once, goes by the limits, priorities and
        retries of all calls, and ends within `deadline_s` seconds (default: `engine.deadline_s`). See `TextStream` for
        its end. The journal neither answers nor records it.

        Call it from the engine's event loop. Raises `EngineError` if the engine is closed, serves another event loop,
        or has no such chat source, and `ValueError` for impossible parameters, deadline or priority. Messages that
        cannot be sent are an error of the stream (`input`).
        """
        asking, due_at = self._streams(sources, parameters, deadline_s, priority)
        arrived = asyncio.Event()
        return TextStream(asking.received(messages, due_at, arrived.set), arrived)

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
        asking, due_at = self._streams(sources, parameters, deadline_s, priority)
        arrived = asyncio.Event()
        changed: dict[int, None] = {}
        receivers: list[Receiver] = []

        def note(number: int) -> None:
            changed[number] = None
            arrived.set()

        try:
            for number, messages in enumerate(list(conversations)):
                receivers.append(asking.received(messages, due_at, partial(note, number)))
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
                    yield number, receiver.answer or receiver.failure()
        finally:
            await asyncio.gather(*(receiver.aclose() for receiver in receivers))

    def _streams(
        self,
        sources: str | Sequence[str],
        parameters: Mapping[str, Any] | None,
        deadline_s: float | None,
        priority: int,
    ) -> tuple[_Asking, float]:
        check_times(deadline_s, priority)
        scoring = self._bind()
        asking = _Asking(scoring.dispatcher, self.upstreams, sources, parameters, priority=priority, name="stream_text")
        return asking, scoring.now() + self._deadline_s(deadline_s)
