"""Handles the requests of a judge server in a provider's order: path, key, body, limits, judge, answer.

Everything here runs on the server's event loop, so the limits need no lock. A request is counted before the first await
after its arrival, so its time is exact. Each path has its own requests and replies: chat in several protocols, scores,
and programs. Limits, latency, faults and the report are shared.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from .faults import FaultKind, FaultPlan, Faults, Latency, PlayFault
from .faulty_answers import faulty_verdict
from .faulty_replies import JudgeExchange, Written, respond, sent_status
from .judge_calls import (
    Answer,
    Completion,
    JudgeCall,
    JudgeReply,
    Refused,
    as_verdict,
    dump_verdict,
    duration,
    list_answer,
    listed,
)
from .limits import Account, ServerLimits, Throttle, bearer_of
from .protocols import PROTOCOLS, Protocol
from .protocols.services import RUN_PATH, WIRES, RewardCall, read_run_call, read_scored, run_reply, scored_reply
from .report import Tally, Violation

_PATHS = {"openai": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}
_GENERATE = ":generateContent"
_STREAM = ":streamGenerateContent"
_VERSIONS = ("/v1beta", "/v1")


@dataclass(frozen=True)
class Route:
    """One path. `read` reads a request and raises `Refused` for the client's mistakes. `reply` makes the n-th reply of
    the scorer's answers, one for each text of the request, with a fault of the stage "verdict" or "list" applied; it
    raises `TypeError` for an invalid answer. `protocol` writes errors and limits. `streams`: whether a reply is
    streamed; None: the body says so.
    """

    protocol: Protocol
    read: Callable[[bytes], JudgeCall]
    reply: Callable[[JudgeCall, Sequence[Answer], FaultKind | None, int], JudgeReply]
    streams: bool | None = False

    def stream_options(self, call: JudgeCall) -> Mapping[str, Any] | None:
        """Return the `stream_options` of a request if it asks for a stream; None if it does not."""
        if (call.parameters.get("stream") if self.streams is None else self.streams) is not True:
            return None
        options = call.parameters.get("stream_options")
        return options if isinstance(options, dict) else {}


Scorer = Callable[[JudgeCall], Answer | Awaitable[Answer]]


class ScorerFailed(Exception):
    """The scorer raised, or returned an invalid answer."""


@dataclass(eq=False)
class JudgeHandler:
    """Answers the requests of one server; the settings are those of `JudgeServer`. `elapsed_s` is the server's clock:
    seconds since its first start.
    """

    score: Scorer
    elapsed_s: Callable[[], float]
    limits: ServerLimits = field(default_factory=ServerLimits)
    latency: Latency = field(default_factory=Latency)
    faults: Faults = field(default_factory=Faults)
    models: Sequence[str] = ("judge",)
    protocols: Sequence[str] = tuple(PROTOCOLS)
    api_key: str | Sequence[str] | None = field(default=None, repr=False)
    seed: int = 0
    streams: bool = True
    stream_interval_s: float = 0.0

    def __post_init__(self) -> None:
        self.tally = Tally(self.limits.window_s)
        # Two generators, so that the latencies stay the same when faults are added.
        self._latency_rng = random.Random(f"{self.seed}/latency")
        self._plan = FaultPlan(self.faults, random.Random(f"{self.seed}/faults"))
        unknown = [name for name in self.protocols if name not in PROTOCOLS]
        if unknown or not self.protocols:
            raise ValueError(f"a judge server needs protocols among {', '.join(PROTOCOLS)}, not {', '.join(unknown)!r}")
        openai = PROTOCOLS["openai"]
        self._routes = {_PATHS[name]: self._chat(PROTOCOLS[name]) for name in self.protocols if name in _PATHS}
        self._routes |= {
            path: Route(openai, partial(read_scored, path, models=self.models), scored_reply) for path in WIRES
        }
        self._routes[RUN_PATH] = Route(openai, read_run_call, run_reply)
        keys = (self.api_key,) if self.api_key is None or isinstance(self.api_key, str) else tuple(self.api_key)
        self._accounts = [Account(key, self.limits) for key in keys]
        self._number = 0
        self._gate = asyncio.Event()
        self.held = False

    def open_gate(self) -> None:
        """Release held answers. Call it on the server's loop, and once before it serves."""
        self._gate.set()
        self._gate = asyncio.Event()

    def revoke(self, api_key: str) -> None:
        """Refuse a key from now on. Raises `ValueError` for an unknown one."""
        found = [account for account in self._accounts if account.bearer == bearer_of(api_key)]
        if not found:
            raise ValueError("the server does not have this key")
        found[0].revoked = True

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        method, path = request.method, request.path
        route, lister = self._route(path, request.query.get("alt", "")), self._lister(path)
        if method == "POST" and route is not None:
            return await self._answer(request, route)
        if (method, path) == ("GET", "/health"):
            return _json({"status": "ok"})
        if method == "GET" and lister is not None:
            try:
                self._authorise(request, lister)
            except Refused as refused:
                return _refusal(refused, lister)
            return _json(lister.model_list(self.models))
        if route is not None or lister is not None or path == "/health":
            return _refusal(Refused(405, f"{method} is not allowed here"))
        gemini = [f"/v1beta/models/MODEL{end}" for end in (_GENERATE, f"{_STREAM}?alt=sse")]
        paths = [*self._routes, *(gemini if "gemini" in self.protocols else ())]
        return _refusal(Refused(404, f"unknown path; use {', '.join(paths)}, /v1/models or /health"))

    def _route(self, path: str, alt: str) -> Route | None:
        """The route of a path; None if there is none. `alt` is the format that its query asks for."""
        if path in self._routes:
            return self._routes[path]
        streams = alt == "sse"
        end = _STREAM if streams else _GENERATE
        for version in _VERSIONS if "gemini" in self.protocols else ():
            if path.startswith(f"{version}/models/") and path.endswith(end):
                return self._chat(PROTOCOLS["gemini"], path[len(version) + 8 : -len(end)], streams=streams)
        return None

    def _lister(self, path: str) -> Protocol | None:
        """The protocol that lists the models at a path; None if there is no list."""
        if path == "/v1beta/models":
            return PROTOCOLS["gemini"] if "gemini" in self.protocols else None
        return PROTOCOLS[self.protocols[0]] if path == "/v1/models" else None

    def _chat(self, protocol: Protocol, model: str = "", *, streams: bool | None = None) -> Route:
        def reply(call: JudgeCall, answers: Sequence[Answer], fault: FaultKind | None, number: int) -> JudgeReply:
            completion = _completion(call, answers[0], fault)
            return JudgeReply(protocol.reply(completion, call, number), completion.tokens)

        return Route(protocol, lambda body: protocol.read(body, self.models, model), reply, streams)

    async def _answer(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            body = None
        arrived_s = self.elapsed_s()
        protocol = route.protocol
        self.tally.arrived(arrived_s)
        try:
            account = self._authorise(request, protocol)
            if body is None:
                raise Refused(413, "the body is too large")
            call = _read(route, body)
            stream = route.stream_options(call)
            if stream is not None and not self.streams:
                raise Refused(400, "this server does not stream: leave 'stream' out")
        except Refused as refused:
            self.tally.count("refused", status=refused.status)
            return _refusal(refused, protocol)
        playing = admitted = gone = False
        try:
            await account.enter(call.prompt_tokens, arrived_s)
            admitted = True
            self.tally.count(prompt_tokens=call.prompt_tokens)
            self.tally.in_flight(+1)
            reply, fault = await self._judged(route, account, call, arrived_s)
            if fault is not None:
                playing = True
                self.tally.count(f"fault {fault}")
            headers = self._announced(account, protocol)
            exchange = JudgeExchange(request, protocol, self.faults, headers, reply, stream, self.stream_interval_s)
            response = await respond(exchange, fault)
            if fault is None:
                self.tally.answered(self.elapsed_s() - arrived_s)
            elif status := sent_status(response):
                self.tally.count(status=status)
            return response
        except Throttle as throttle:
            return self._throttled(account, protocol, throttle, arrived_s)
        except ScorerFailed:
            return _json(protocol.error(500, "the scorer of this judge server failed; see its report"), status=500)
        except (asyncio.CancelledError, ConnectionError) as error:
            gone = True
            if not playing:
                self.tally.count("abandoned")
            if isinstance(error, ConnectionError):
                return Written(0)
            raise
        finally:
            if admitted:
                self.tally.in_flight(-1)
                account.leave(gone=gone)

    def _authorise(self, request: web.BaseRequest, protocol: Protocol) -> Account:
        given = protocol.key_in(request.headers).encode("utf-8", "surrogateescape")
        for account in self._accounts:
            if account.bearer is None or (hmac.compare_digest(given, account.bearer) and not account.revoked):
                return account
        raise protocol.key_refused()

    async def _judged(
        self, route: Route, account: Account, call: JudgeCall, arrived_s: float
    ) -> tuple[JudgeReply | None, FaultKind | None]:
        """The reply, and the fault to play, after the request's latency."""
        number, self._number = self._number, self._number + 1
        fault = self._plan.choose()
        items = call.items if isinstance(call, RewardCall) else (call,)
        delay_s = self.latency.draw(self._latency_rng)
        reply = None
        if fault is None or fault.has_answer:
            try:
                reply = route.reply(call, [await self._answer_about(item) for item in items], fault, number)
            except PlayFault as played_by_scorer:
                fault = played_by_scorer.kind
            except Exception as error:
                self.tally.scorer_failed(error)
                raise ScorerFailed from error
        if reply is not None:
            if excess := account.limits.tokens.take(reply.tokens, self.elapsed_s()):
                account.limits.give_back(call.prompt_tokens, arrived_s)
                self.tally.count(prompt_tokens=-call.prompt_tokens)
                raise Throttle("tokens", excess)
            self.tally.count(completion_tokens=reply.tokens)
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        while self.held:
            await self._gate.wait()
        return reply, fault

    async def _answer_about(self, item: JudgeCall) -> Answer:
        each = listed(item)
        answers = []
        for call in each or (item,):
            answer = self.score(call)
            answers.append(await answer if inspect.isawaitable(answer) else answer)
        return list_answer(answers) if each else answers[0]

    def _throttled(
        self, account: Account, protocol: Protocol, throttle: Throttle, arrived_s: float
    ) -> web.StreamResponse:
        kind, excess = throttle.kind, throttle.excess
        early_s = None if kind == "concurrency" else excess.retry_after_s
        self.tally.violated(Violation(kind, arrived_s, excess.over, early_s))
        headers = self._announced(account, protocol)
        message = f"over the limit on {kind} by {excess.over:g}"
        if early_s is not None:
            message += f", try again in {duration(early_s)}"
            if not protocol.pause_in_body:
                headers["Retry-After"] = str(math.ceil(early_s))
        return _json(protocol.error(429, message, "rate_limit_exceeded", early_s), status=429, headers=headers)

    def _announced(self, account: Account, protocol: Protocol) -> dict[str, str]:
        headers: dict[str, str] = {}
        for what, announced in account.limits.announced(self.elapsed_s()).items():
            # Floating point may put the rate of 0.7 a second just below 42 a minute.
            limit, remaining = (math.floor(each + 1e-9) for each in (announced.limit, announced.remaining))
            headers |= protocol.announce(what, limit, remaining, announced.reset_s)
        return headers


def _completion(call: JudgeCall, answer: Answer, fault: FaultKind | None) -> Completion:
    verdict = as_verdict(call, answer)
    if fault is not None and fault.stage == "verdict":
        return faulty_verdict(fault, call, verdict)
    return Completion(verdict if isinstance(verdict, str) else dump_verdict(verdict)).cut(call.max_tokens)


def _read(route: Route, body: bytes) -> JudgeCall:
    """Read a request. Raises `Refused` for a client's mistake."""
    try:
        return route.read(body)
    except (AttributeError, KeyError, TypeError) as error:
        raise Refused(400, f"the body has another form than this protocol: {error!r}") from None


def _json(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json", headers=headers)


def _refusal(refused: Refused, protocol: Protocol = PROTOCOLS["openai"]) -> web.Response:
    return _json(protocol.error(refused.status, str(refused), refused.code), status=refused.status)
