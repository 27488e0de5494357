"""Streams of text: the answer of a chat source in pieces, as they come, for callers that want the text itself.

A stream is one call of the scheduler. Until the first piece, the call is retried and goes to other sources as any call.
After it, an error ends the stream, because a text that was handed out cannot be taken back.

The source is read as fast as it sends, however slowly the caller reads. So a slow caller holds neither a connection nor
a permit, and is no silence. What it has not read yet is kept, at most `max_reply_bytes` of the source.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ..config import configured_name
from ..errors import EngineError, InputError, InvalidReply, TextStreamFailed, input_problem
from ..samples import Message, Sample
from ..samples.json_values import as_json
from ..samples.spent import NOTHING, Spent
from ..scheduling import Answer, Batch, Call, Dispatcher, Unanswered, Upstream
from ..sources import TEXT, Reply, Request
from .followed_calls import FollowedCall

DEFAULT_MAX_TOKENS = 1024
NAME = "stream_text"
"""The name of the calls in events, where others have the name of their judge."""

_SET_BY_SOURCE = ("model", "messages", "stream", "stream_options", "n")


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


Streamed: TypeAlias = "str | TextAnswer | TextStreamFailed"
"""A piece of a text, or how its stream ended."""


class TextStream:
    """The pieces of one text, as they come: an asynchronous iterator of texts that are not empty.

    Thoughts that the server states apart are left out. Pieces that come while nobody reads are joined. A source that
    does not stream gives the whole text as one piece. Iterating raises `TextStreamFailed` if the text does not become
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

    def failure(self) -> TextStreamFailed:
        """The error of a stream that is `unanswered`."""
        why = self.unanswered or Unanswered("closed")
        return TextStreamFailed(why.reason, why.detail, text=self._text.getvalue(), source=why.source, spent=why.spent)

    def _take_answer(self, answer: Answer[Any]) -> None:
        reply: Reply = answer.value
        so_far = self._text.getvalue()
        if not reply.text.startswith(so_far):
            detail = f"{answer.source}: the whole text is not that of its stream"
            self.unanswered = Unanswered("broken", detail, source=answer.source, spent=answer.spent)
            return
        self._text.seek(0, io.SEEK_END)
        self._text.write(reply.text[len(so_far) :])
        self.answer = TextAnswer(
            reply.text,
            reply.thinking,
            answer.source,
            answer.model,
            reply.finish_reason,
            reply.first_token_s,
            answer.spent,
        )

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


class TextCalls:
    """Opens the streams of one batch, over the chat sources that the caller named.

    Raises `EngineError` for a source that does not exist or gives no text, and `ValueError` for `parameters` that a
    source sets itself.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        upstreams: Mapping[str, Upstream],
        sources: str | Sequence[str],
        parameters: Mapping[str, Any],
        *,
        priority: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._sources = _chat_sources(sources, upstreams)
        self._parameters = _checked(parameters)
        # Never sealed: it is no batch of samples, and has no report.
        self._batch = dispatcher.batches.new((), priority=priority)

    def open(self, messages: Sequence[Message], due_at: float) -> TextStream:
        """Ask for the text that follows `messages`."""
        arrived = asyncio.Event()
        return TextStream(self._ask(messages, due_at, arrived.set), arrived)

    async def merged(
        self, conversations: Sequence[Sequence[Message]], due_at: float
    ) -> AsyncGenerator[tuple[int, Streamed], None]:
        """Ask for all texts at once, and yield (index, piece) as the pieces come, and (index, end) for each."""
        arrived = asyncio.Event()
        changed: dict[int, None] = {}
        receivers: list[Receiver] = []

        def note(number: int) -> None:
            changed[number] = None
            arrived.set()

        try:
            for number, messages in enumerate(conversations):
                receivers.append(self._ask(messages, due_at, partial(note, number)))
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

    def _ask(self, messages: Sequence[Message], due_at: float, on_change: Callable[[], None]) -> Receiver:
        receiver = Receiver(self._dispatcher, self._batch, on_change)
        try:
            request: Request | InputError = self._request(messages)
        except Exception as error:  # foreign objects may raise anything when they are read
            request = InputError(input_problem(error))
        receiver.start(Call(self._sources, lambda attempt: _made(request), _read, NAME, on_text=receiver.add), due_at)
        return receiver

    def _request(self, messages: Sequence[Message]) -> Request:
        if isinstance(messages, (str, bytes, Mapping)) or not messages:
            raise InputError("the messages must be a list with at least one message")
        copies: list[Message] = []
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise InputError(f"message {number} must be a mapping with role and content")
            role, content = message.get("role"), message.get("content")
            if not (isinstance(role, str) and isinstance(content, str)):
                raise InputError(f"message {number} needs a role and a content, both texts")
            copies.append({"role": role, "content": content})
        return Request(
            Sample([], ""),
            tuple(copies),
            self._parameters,
            max_completion_tokens=self._parameters["max_tokens"],
            judge=NAME,
        )


def _made(request: Request | InputError) -> Request:
    if isinstance(request, InputError):
        raise InputError(str(request))
    return request


def _read(request: Request, reply: Reply) -> Reply:
    if not isinstance(reply.text, str):
        raise InvalidReply("the reply has no text")
    return reply


def _chat_sources(sources: str | Sequence[str], upstreams: Mapping[str, Upstream]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for name in (sources,) if isinstance(sources, str) else sources:
        # A source with several keys is as many upstreams.
        meant = [each for each in upstreams if name in (each, configured_name(each))]
        if not meant:
            raise EngineError(f"unknown source {name!r}; sources: {', '.join(upstreams)}")
        if TEXT not in getattr(upstreams[meant[0]].source, "answers", (TEXT,)):
            raise EngineError(f"source {name!r} gives no text; a text stream needs a chat source")
        found.update(dict.fromkeys(meant))
    if not found:
        raise ValueError("a text stream needs at least one source")
    return tuple(found)


def _checked(parameters: Mapping[str, Any]) -> dict[str, Any]:
    taken = [key for key in _SET_BY_SOURCE if key in parameters]
    if taken:
        raise ValueError(f"parameters.{taken[0]} is set by the source; leave it out")
    bound = parameters.get("max_tokens", DEFAULT_MAX_TOKENS)
    if not isinstance(bound, int) or isinstance(bound, bool) or bound < 1:
        raise ValueError(f"parameters.max_tokens must be a whole number from 1 on, not {bound!r}")
    try:
        plain = {key: as_json(value, f"parameters.{key}") for key, value in parameters.items()}
    except InputError as error:
        raise ValueError(str(error)) from None
    return {"max_tokens": bound, **plain}
