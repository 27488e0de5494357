"""The reward server: one engine behind HTTP, so that every process and every framework shares its queue and its limits.

It adds no rule to the engine. A request becomes samples, outcomes become a reply. A missing reward is an HTTP status
and a cause, never 0.0 and never null without a cause. aiohttp serves, because the sources use it already: it caps
bodies, and it cancels a handler whose caller has gone, which frees the attempts of that caller.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio
import orjson
from aiohttp import web

from ..client.facts import FACTS_PATH
from ..client.link import PATH as ENGINE_PATH
from ..engine import RewardEngine
from ..errors import EngineError, InputError
from ..samples import Outcome
from .admission import Admission
from .description import describe
from .engines import Engines
from .forms import FORMS, Form, ScoreRequest
from .model_calls.terms import read_terms
from .proxy import KEY_HEADERS, PREFIXES, ProxyPaths
from .replies import Refused, json_reply

_log = logging.getLogger("qreward_plugins.server")

MOST_BODY_BYTES = 64 * 2**20
MOST_SAMPLES = 100_000
DRAIN_S = 60.0
REPLY_WITHIN_S = 5.0
"""Seconds in which replies are sent after the server stopped listening."""
BODY_WITHIN_S = 60.0
"""Most seconds in which the body of a request arrives; later ones get 408."""
IDLE_S = 75.0
"""Seconds after which a connection without a whole request head is closed."""
_OPEN_PATHS = ("/healthz", "/readyz")
"""Paths that need no token: an orchestrator asks them, and they tell nothing about samples."""


class RewardServer:
    """Serves an engine over HTTP.

    Args:
        engine: its engine. The caller closes it before the server, so that requests still under way get a reply.
        host, port: where it listens; port 0 lets the system choose.
        token: callers must send it as `Authorization: Bearer`. None: no token, which only a loopback address allows.
        max_body_bytes: larger bodies are refused with 413.
        max_samples: most samples under way; more are refused with 429.

    Raises `InputError` for a host that others can reach without a token, and for numbers out of range.
    """

    def __init__(
        self,
        engine: RewardEngine,
        *,
        host: str = "127.0.0.1",
        port: int = 8080,
        token: str | None = None,
        max_body_bytes: int = MOST_BODY_BYTES,
        max_samples: int = MOST_SAMPLES,
    ) -> None:
        if token is not None and not token.strip():
            raise InputError("the token is empty; set a long random text, or none on a loopback address")
        if token is None and not _is_loopback(host):
            raise InputError(
                f"{host} can be reached by others, so a token is needed: put it into an environment variable and name "
                "that variable with --token-env; or listen on 127.0.0.1"
            )
        if max_body_bytes < 1 or max_samples < 1:
            raise InputError("max_body_bytes and max_samples must be at least 1")
        self._engine = engine
        self._host, self._port = host, port
        self._token = None if token is None else _digest(token.strip())
        self._max_body_bytes = max_body_bytes
        self._admission = Admission(max_samples)
        self._engines = Engines(engine, self._admission, max_bytes=max_body_bytes)
        self._requests: Counter[tuple[str, int]] = Counter()
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Its address, when it listens."""

    async def start(self) -> None:
        """Listen. Raises `InputError` if the address is in use or is none of this machine."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._answer])
        for form in FORMS:
            app.router.add_post(form.path, self._handler(form))
        ProxyPaths(self._engine, self._client_call).add_to(app.router)
        app.router.add_get(ENGINE_PATH, self._engines.serve)
        app.router.add_get(FACTS_PATH, self._facts)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/openapi.json", self._description)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=REPLY_WITHIN_S, keepalive_timeout=IDLE_S
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self.aclose()
            # asyncio writes a sentence of its own around the system's.
            why = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
            raise InputError(
                f"cannot listen on {self._host}:{self._port} ({why}); choose another port or host"
            ) from None
        # Begins to watch the configuration and to share limits. Otherwise the first sample would.
        self._engine.dispatcher()
        port = self._runner.addresses[0][1]
        self.url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"

    async def drain(self, within_s: float = DRAIN_S) -> int:
        """Refuse new samples, and wait until those under way have their outcomes.

        Return the number of samples that have none after `within_s` seconds. Closing the engine fails them.
        """
        self._admission.draining = True
        try:
            with anyio.fail_after(within_s):
                await self._admission.idle()
        except TimeoutError:
            _log.warning("%d samples have no outcome after %g s", self._admission.under_way, within_s)
        return self._admission.under_way

    async def aclose(self) -> None:
        """Stop listening, and cancel the requests that are left. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await self._engines.aclose()
            await runner.cleanup()

    async def __aenter__(self) -> RewardServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # Rewards

    def _handler(self, form: Form) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            score_request = form.read(await _json(request))
            deadline_s, priority = self._terms(request, score_request)
            value, status = form.answer(score_request, await self._score(score_request, deadline_s, priority))
            return json_reply(value, status)

        return handle

    async def _score(
        self, score_request: ScoreRequest, deadline_s: float | None, priority: int | None
    ) -> Sequence[Outcome]:
        if not score_request.samples:
            return []
        with self._admitted(len(score_request.samples), deadline_s):
            if score_request.single:
                sample = score_request.samples[0]
                return [await self._engine.score(sample, deadline_s=deadline_s, priority=priority)]
            return await self._engine.score_all(score_request.samples, deadline_s=deadline_s, priority=priority)

    def _client_call(self, request: web.Request) -> AbstractContextManager[None]:
        """Admit a call of the proxy."""
        return self._admitted(1, self._terms(request, _CLIENT_CALL)[0])

    @contextmanager
    def _admitted(self, count: int, deadline_s: float | None) -> Iterator[None]:
        """Count samples, or calls of clients, as under way. Raises `Refused` if they cannot be done in time."""
        self._admission.admit(count, self._engine.config.engine.deadline_s if deadline_s is None else deadline_s)
        whole = False
        try:
            yield
            whole = True
        finally:
            if whole:
                self._admission.ended(count)
            else:
                self._admission.left(count)

    @staticmethod
    def _terms(request: web.Request, score_request: ScoreRequest) -> tuple[float | None, int | None]:
        """Return deadline and priority: those of the headers, or else those of the body."""
        deadline_s, priority = read_terms(request.headers)
        return (
            score_request.deadline_s if deadline_s is None else deadline_s,
            score_request.priority if priority is None else priority,
        )

    # The server itself

    async def _facts(self, _: web.Request) -> web.Response:
        return json_reply(self._engines.facts().as_row())

    async def _health(self, _: web.Request) -> web.Response:
        return json_reply({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        states = {name: source.state for name, source in self._engine.statistics().sources.items()}
        usable = any(not upstream.health.unusable for upstream in self._engine.upstreams.values())
        ready = usable and not self._admission.draining
        status = "ready" if ready else "draining" if self._admission.draining else "all sources are out"
        return json_reply({"status": status, "sources": states}, 200 if ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        try:
            from .exposition import exposition
        except ModuleNotFoundError:
            raise Refused(
                501, "unavailable", "metrics need prometheus_client: pip install 'qreward-plugins[server]'"
            ) from None
        text = exposition(self._engine.statistics(), self._admission.under_way, self._requests)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _description(self, _: web.Request) -> web.Response:
        return json_reply(describe(FORMS, bearer=self._token is not None))

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the sender, turn errors into replies, and count."""
        response: web.StreamResponse
        try:
            self._check_token(request)
            await _arrived(request)
            response = await handler(request)
        except Refused as refused:
            response = refused.response(request)
        except InputError as error:
            response = Refused(422, "input", str(error)).response(request)
        except EngineError as error:
            response = Refused(503, "closed", str(error)).response(request)
        except web.HTTPException as error:
            detail = _HTTP_DETAIL.get(error.status, error.reason)
            response = Refused(error.status, "http", detail).response(request)
        except Exception as error:
            _log.exception("a request failed with an unexpected error")
            detail = f"unexpected {type(error).__name__}; see the server's log"
            response = Refused(500, "bug", detail).response(request)
        known = request.match_info.route.resource
        self._requests[known.canonical if known is not None else "other", response.status] += 1
        return response

    def _check_token(self, request: web.Request) -> None:
        if request.path in _OPEN_PATHS:
            return
        if self._token is None:
            _check_sender(request)
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if request.path.startswith(PREFIXES):
            for header in KEY_HEADERS:
                if header in request.headers:
                    scheme, given = "bearer", request.headers[header]
        # Digests have one length, so that the comparison does not tell the length of the token.
        if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(given.strip()), self._token):
            raise Refused(401, "token", "send the server's token as `Authorization: Bearer TOKEN`")


_CLIENT_CALL = ScoreRequest((), single=True)
_HTTP_DETAIL = {
    404: "unknown path; /openapi.json lists them",
    405: "rewards are asked for with POST",
    413: "the body is too large; send fewer samples in a request, or raise --max-body-mb",
}


async def _arrived(request: web.Request) -> None:
    """Read the body, so that no caller keeps a handler by sending it slowly. Raises `Refused`."""
    if not request.can_read_body:
        return
    try:
        with anyio.fail_after(BODY_WITHIN_S):
            await request.read()
    except TimeoutError:
        raise Refused(408, "slow", f"the body did not arrive within {BODY_WITHIN_S:g} s") from None
    except web.RequestPayloadError:
        raise Refused(400, "http", "the body was cut off, or is not encoded as its Content-Encoding says") from None


async def _json(request: web.Request) -> Mapping[str, Any]:
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise Refused(400, "json", f"the body is not JSON: {error.msg} at byte {error.pos:,}") from None
    if not isinstance(body, Mapping):
        raise InputError("the body must be a JSON object")
    return body


def _check_sender(request: web.Request) -> None:
    """Refuse what a web page in a browser of this machine could send. Raises `Refused`."""
    origin, host, body = request.headers.get("Origin"), request.host, request.content_type
    if origin is not None and origin.partition("://")[2] != host:
        status, what, remedy = 403, f"a request of the web page {origin}", "start the server with --token-env"
    elif not _is_address(host):
        remedy = "ask for 127.0.0.1 or localhost, or start the server with --token-env"
        status, what = 403, f"a request for the host {host}"
    elif request.can_read_body and body != "application/json":
        remedy = "send `Content-Type: application/json`, or start the server with --token-env"
        status, what = 415, f"a body of the type {body}"
    else:
        return
    raise Refused(status, "sender", f"{what} needs a token, because any web page could send it; {remedy}")


def _is_address(host: str) -> bool:
    """Whether a `Host` is an address, with or without a port. A web page can point any other name to this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
