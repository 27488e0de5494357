"""The proxy: answers clients' own requests over the sources of an engine, with limits, retries, failover and hedging.

The body goes to a source as it came, but for the model, and the reply comes back as the source sent it. The client's
key never leaves, and the source's key never comes back. What the scheduler gave up becomes an error in the client's own
form, with cause and reason, never a made-up answer. Nothing is recorded in the journal.

`Proxy` has no HTTP of its own: `transport` puts it into httpx clients, and `passed_on` behind the server's port. There
a client sends the server's token as its API key, in the header of its own format.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
from aiohttp import web

from ..config import sources_for_model
from ..engine.followed_calls import FollowedCall
from ..errors import EngineError, InputError, ReplyBroken
from ..samples import Sample
from ..scheduling.batches import Batch, Member
from ..scheduling.calls import Call, Unanswered
from ..scheduling.dispatcher import Dispatcher
from ..scheduling.planner import Choice, strategy
from ..secrets import one_line
from ..sources import Reply, Request
from ..sources.passed_requests import PassedRequest, RawReply, Receiver, forwarded_headers, parsed_body
from .formats import FORMATS, GEMINI, Format, client_format, format_of

if TYPE_CHECKING:
    from ..config.models import ModelRoute
    from ..engine import RewardEngine

DEFAULT_COMPLETION_TOKENS = 4096
"""Completion tokens that are reserved for a request that does not bound its completion."""
NAME = "client"
"""The name of the calls in events, where others have the name of their judge."""
NO_RETRY = {"x-should-retry": "false"}
"""Tells the SDKs of OpenAI and Anthropic not to ask again: the scheduler has done that."""
CALLS_A_BATCH = 64
"""Calls that share a budget of hedges. Each on its own would have one of at least 4."""
UNREAD_BYTES = 262_144
"""Bytes of a stream that are kept for a client that reads slowly. Beyond them, the source is not read."""
PREFIXES = ("/v1/", "/v1beta/")
"""How the paths of the proxy begin at a server."""
KEY_HEADERS = ("x-api-key", "x-goog-api-key")
"""Headers in which clients of Anthropic and Gemini send their key."""
READ_WITHIN_S = 60.0
"""Most seconds in which a caller reads a piece of a stream. Then its connection is broken, and its place is free."""
_SHOWN_CHARS = 200
"""Most characters of a model or a path in a message."""
_STATUSES = {"deadline": 504, "invalid": 502, "garbage": 502, "input": 400, "refused": 400}
_CAUSES = {"invalid": "verdict", "input": "policy", "refused": "policy"}


@dataclass(frozen=True)
class ClientRequest:
    """A request of a client. `path` is without the query. Names of `headers` are in any case. `read_timeout_s`: most
    seconds that the client waits for the next part of its reply; None: any number.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    read_timeout_s: float | None = None


class Pieces(FollowedCall, Receiver):
    """One call of the scheduler, and the body of its streamed reply as it comes: an asynchronous iterator of bytes.

    Iterating raises `ReplyBroken` if the reply does not become whole, after all that came, and `TimeoutError` if
    nothing comes within `read_timeout_s` seconds. `aclose` and cancelling the task that waits end the call.
    """

    def __init__(self, dispatcher: Dispatcher, batch: Batch, read_timeout_s: float | None) -> None:
        super().__init__(dispatcher, Member(batch))
        self._arrived = asyncio.Event()
        self.result.add_done_callback(lambda _: self._arrived.set())
        self._read_timeout_s = read_timeout_s
        self._pieces: deque[str] = deque()
        self._unread = 0
        self._room = asyncio.Event()
        self._room.set()
        self.head = RawReply(200, {})
        """The head of a stream that has begun."""
        self.has_begun = False
        self.refusal: RawReply | None = None
        """The reply of a source that refused the request."""

    # Called by the source

    def begin(self, head: RawReply) -> None:
        if not self.over:
            self.head, self.has_begun = head, True

    def refused(self, reply: RawReply) -> None:
        self.refusal = reply

    def add(self, piece: str) -> None:
        """Take in a piece of a stream."""
        self._pieces.append(piece)
        self._unread += len(piece)
        if self._unread > UNREAD_BYTES:
            self._room.clear()
        self._arrived.set()

    def has_room(self) -> bool:
        return self._room.is_set()

    async def wait_for_room(self) -> None:
        await self._room.wait()

    # Called for the client

    async def begun(self) -> None:
        """Wait until the reply has begun or the call is over. Raises `TimeoutError`."""
        while not (self.over or self._pieces):
            await self._wait()

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces:
            if self.over:
                result = None if self.result.cancelled() else self.result.result()
                if isinstance(result, Unanswered):
                    raise ReplyBroken(f"{result.reason}: {result.detail}")
                raise StopAsyncIteration
            await self._wait()
        text = "".join(self._pieces)
        self._pieces.clear()
        self._unread = 0
        self._room.set()
        return text.encode("utf-8", "surrogateescape")

    async def _wait(self) -> None:
        self._arrived.clear()
        try:
            with anyio.fail_after(self._read_timeout_s):
                await self._arrived.wait()
        except (TimeoutError, asyncio.CancelledError):
            self.drop()
            raise


class Proxy:
    """Answers clients over the sources of `engine`, in the engine's event loop."""

    def __init__(self, engine: RewardEngine) -> None:
        self.engine = engine
        self._choices: dict[ModelRoute, Choice | None] = {}
        """The strategies of the groups of models, which have one state for all requests. Equal groups share one."""
        self._dispatcher: Dispatcher | None = None
        self._batch: Batch | None = None

    async def answer(self, incoming: ClientRequest) -> RawReply | Pieces:
        """Return the reply, or the pieces of a stream, which the caller has to read or close. Errors are replies, too,
        in the form of the client.

        Raises only `TimeoutError`, if nothing comes within the client's read timeout. Cancelling ends the attempts.
        """
        form = client_format(incoming.path, incoming.headers)
        try:
            if incoming.method == "GET" and incoming.path.endswith("/models"):
                return self._listed(form)
            return await self._forward(incoming, form)
        except InputError as error:
            return refusal(form, 400, str(error), reason="input")
        except EngineError as error:
            return refusal(form, 503, str(error), cause="infra", reason="closed")

    def _listed(self, form: Format) -> RawReply:
        models = self._models()
        if form is GEMINI:
            return _json(200, {"models": [{"name": f"models/{name}", "displayName": name} for name in models]})
        return _json(200, {"object": "list", "data": [*map(_model, models)], "has_more": False})

    def _models(self) -> tuple[str, ...]:
        """The names and patterns of models that clients may ask for, and the models of sources that match one."""
        config = self.engine.config
        sources = [upstream.source for upstream in self.engine.upstreams.values()]
        answering = [source.model for source in sources if source.passes]
        if config.models:
            answering = [model for model in answering if sources_for_model(config, model)[0]]
        return tuple(dict.fromkeys([*config.models, *answering]))

    async def _forward(self, incoming: ClientRequest, form: Format) -> RawReply | Pieces:
        if format_of(incoming.path) is None:
            known = ", ".join((*(each.path for each in FORMATS), "/models"))
            path = one_line(incoming.path, _SHOWN_CHARS)
            detail = f"{incoming.method} {path} is not passed on; the paths that are end in {known}"
            return refusal(form, 404, detail, reason="path")
        if incoming.method != "POST":
            return refusal(form, 405, f"{incoming.path} takes POST", reason="path")
        body = parsed_body(incoming.body)
        model = form.model_of(incoming.path, body)
        names, group = sources_for_model(self.engine.config, model)
        sources = tuple(name for name in names if self._speaks(name, form))
        if not sources:
            named = repr(one_line(model, _SHOWN_CHARS))
            what = f"no source of the model {named} speaks this format ({form.path})" if names else f"no model {named}"
            detail = f"{what}; models: {', '.join(self._models()) or 'none'}"
            return refusal(form, 404, detail, reason="model_not_found")
        # A source with several keys stands here once for each: they may be those of several accounts.
        problem = form.refusal(body, alone=len(sources) == 1)
        if problem:
            return refusal(form, 400, problem, reason="state")
        dispatcher, streams = self.engine.dispatcher(), form.streams(incoming.path, body)
        pieces = Pieces(dispatcher, self._next_batch(dispatcher), incoming.read_timeout_s)
        headers = forwarded_headers(incoming.headers)
        passed = PassedRequest(body, headers, streams, len(sources) == 1, pieces)
        request = Request(Sample([], ""), max_completion_tokens=DEFAULT_COMPLETION_TOKENS, judge=NAME, passed=passed)
        call: Call[Any] = Call(
            sources,
            lambda attempt: request,
            _raw,
            NAME,
            on_text=pieces.add if streams else None,
            once=form.changes_something(body),
            refusal_ends=True,
            choose=self._choice(group),
        )
        pieces.start(call, dispatcher.now() + self.engine.config.engine.deadline_s)
        await pieces.begun()
        if pieces.has_begun:
            return pieces
        result = await pieces.result
        if isinstance(result, Unanswered):
            return _failed(form, result, pieces.refusal)
        raw: RawReply = result.value
        return raw

    def _speaks(self, name: str, form: Format) -> bool:
        upstream = self.engine.upstreams.get(name)
        return upstream is not None and not set(upstream.source.passes).isdisjoint(form.dialects)

    def _choice(self, group: ModelRoute | None) -> Choice | None:
        """Return the strategy of a group; None: that of the engine."""
        if group is None or group.strategy is None:
            return None
        if group not in self._choices:
            self._choices[group] = strategy(group.strategy)
        return self._choices[group]

    def _next_batch(self, dispatcher: Dispatcher) -> Batch:
        """Return the batch of the next call."""
        if dispatcher is not self._dispatcher or self._batch is None or self._batch.jobs >= CALLS_A_BATCH:
            self._dispatcher, self._batch = dispatcher, dispatcher.batches.new()
        return self._batch


def refusal(
    form: Format,
    status: int,
    message: str,
    *,
    reason: str,
    cause: str = "policy",
    headers: Mapping[str, str] = NO_RETRY,
) -> RawReply:
    """Return an error in the form of a client."""
    return _json(status, form.error(status, message, cause, reason), headers)


def _failed(form: Format, why: Unanswered, refused: RawReply | None) -> RawReply:
    """Return the error for a call that has no answer."""
    if why.reason == "refused" and refused is not None:
        return RawReply(refused.status, {**refused.headers, **NO_RETRY}, refused.body)
    status, cause = _STATUSES.get(why.reason, 503), _CAUSES.get(why.reason, "infra")
    detail = f"{cause}/{why.reason}: {why.detail}" if why.detail else f"{cause}/{why.reason}"
    return refusal(form, status, detail, reason=why.reason, cause=cause)


def _json(status: int, value: Any, headers: Mapping[str, str] = {}) -> RawReply:
    return RawReply(status, {"content-type": "application/json", **headers}, json.dumps(value).encode())


def _model(name: str) -> dict[str, Any]:
    """Return what a list of models says of one, in the form that the clients of OpenAI and Anthropic read."""
    return {"id": name, "object": "model", "type": "model", "display_name": name, "created": 0, "owned_by": "qreward"}


def _raw(request: Request, reply: Reply) -> Any:
    return reply.value


async def passed_on(proxy: Proxy, request: web.Request) -> web.StreamResponse:
    """Answer the request of a client at the server's port."""
    body = await request.read()
    reply = await proxy.answer(ClientRequest(request.method, request.rel_url.raw_path, request.headers, body))
    if isinstance(reply, RawReply):
        return whole(reply)
    response = web.StreamResponse(status=reply.head.status, headers=reply.head.headers)
    try:
        await response.prepare(request)
        async for piece in reply:
            await written(request, response, piece)
        await written(request, response, None)
    except (ReplyBroken, ConnectionError):
        # Closed without the end of the body, the connection tells the client that the reply is not whole.
        response.force_close()
        if request.transport is not None:
            request.transport.close()
    finally:
        await asyncio.shield(reply.aclose())
    return response


async def written(request: web.Request, response: web.StreamResponse, piece: bytes | None) -> None:
    """Write a piece of a stream, or its end (None). Raises `ConnectionError` if the caller has gone, or does not read
    it within `READ_WITHIN_S`; its connection is broken then.
    """
    try:
        with anyio.fail_after(READ_WITHIN_S):
            await (response.write_eof() if piece is None else response.write(piece))
    except TimeoutError:
        if request.transport is not None:
            # Closing would wait until the caller has read what is buffered.
            request.transport.abort()
        raise ConnectionAbortedError("the caller does not read") from None


def whole(reply: RawReply) -> web.Response:
    """Return a reply that is no stream."""
    return web.Response(body=reply.body, status=reply.status, headers=reply.headers)


def in_form(request: web.Request, status: int, reason: str, detail: str, again: Mapping[str, str]) -> web.Response:
    """Return an error of the server in the form of a client. With the header `again`, its SDK asks again by itself."""
    cause = "infra" if status >= 500 or status == 429 else "policy"
    form = client_format(request.path, request.headers)
    return whole(refusal(form, status, detail, reason=reason, cause=cause, headers=again or NO_RETRY))
