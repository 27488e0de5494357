"""The reward server: one engine behind HTTP, so that every process and every framework shares its queue and its limits.

It adds no rule to the engine. A request becomes samples, outcomes become a reply. A missing reward is an HTTP status
and a cause, never 0.0 and never null without a cause. Not more than `max_samples` samples are under way, and their
deadlines do the rest. aiohttp serves, because the sources use it already: it caps bodies, and it cancels a handler
whose caller has gone, which frees the attempts of that caller.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import orjson
from aiohttp import web

from .. import __version__
from ..client.rows import FACTS_PATH, JUDGES_HEADER, LINES, ServerFacts
from ..config import Config, SourceConfig, configured_name, routes_of
from ..engine import RewardEngine
from ..errors import BudgetSpent, EngineError, InputError
from ..judges import compares_siblings
from ..samples import Cause, Failed, Outcome, Sample
from ..sources.kind import own_settings
from ..system.threads import cancel_futures
from .access import OPEN_PATHS, Access
from .formats import FORMATS
from .forms import FORMS, Form, Refused, ScoreRequest, arrived, json_reply, read_body, read_score, result_of
from .proxy import Proxy, passed_on, written

_log = logging.getLogger("qreward_plugins.server")

MOST_BODY_BYTES = 64 * 2**20
MOST_SAMPLES = 100_000
DRAIN_S = 60.0
REPLY_WITHIN_S = 5.0
"""Seconds in which replies are sent after the server stopped listening."""
IDLE_S = 75.0
"""Seconds after which a connection without a whole request head is closed."""
SIGN_OF_LIFE_S = 15.0
"""A reply of lines has an empty one after so many seconds without an outcome."""
RETRY_AFTER_S = 1.0
"""Seconds after which a server that is full, or about to stop, may be asked again."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RewardServer:
    """Serves an engine over HTTP.

    Args:
        engine: its engine. The caller closes it before the server, so that requests still under way get a reply.
        host, port: where it listens; port 0 lets the system choose.
        token: callers must send it as `Authorization: Bearer`. None: no token, which only a loopback address allows.
        max_body_bytes: larger bodies are refused with 413.
        max_samples: most samples and calls under way; a request that would exceed it is refused with 429.

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
        if max_body_bytes < 1 or max_samples < 1:
            raise InputError("max_body_bytes and max_samples must be at least 1")
        self._engine = engine
        self._proxy = Proxy(engine)
        self._host, self._port = host, port
        self._access = Access(token, host)
        self._max_body_bytes, self._max_samples = max_body_bytes, max_samples
        self._known_facts: tuple[Config, ServerFacts] | None = None
        self._requests: Counter[tuple[str, int]] = Counter()
        self._runner: web.AppRunner | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.under_way = 0
        """Samples and calls that were taken in and have no outcome yet."""
        self.url = ""
        """Its address, when it listens."""

    async def start(self) -> None:
        """Listen. Raises `InputError` if the address is in use or is none of this machine."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._answer])
        app.router.add_post("/score", self._score)
        for path, form in FORMS.items():
            app.router.add_post(path, partial(self._in_form, form))
        for passed in FORMATS:
            app.router.add_post(f"/v1{passed.path}", self._pass_on)
        # The name of a model may have slashes; the proxy refuses what is no path of it.
        app.router.add_route("*", "/{version:v1|v1beta}/{path:.*}", self._pass_on)
        app.router.add_get(FACTS_PATH, self._facts)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", self._metrics)
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
        self._draining = True
        try:
            with anyio.fail_after(within_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("%d samples have no outcome after %g s", self.under_way, within_s)
        return self.under_way

    async def aclose(self) -> None:
        """Stop listening, and cancel the requests that are left. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def __aenter__(self) -> RewardServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # Rewards

    async def _score(self, request: web.Request) -> web.StreamResponse:
        expected = request.headers.get(JUDGES_HEADER)
        if expected is not None and expected != self._facts_now().fingerprint:
            detail = "its judges, routes or models have changed since this run began, so rewards could not be compared"
            raise Refused(409, "other_judges", detail)
        asked = await read_body(request, read_score)
        if LINES in request.headers.get("Accept", ""):
            return await self._stream(request, asked)
        outcomes = await self._outcomes(asked)
        rows = [_row(sample, outcome) for sample, outcome in zip(asked.samples, outcomes, strict=True)]
        if asked.single:
            return json_reply(rows[0], rows[0]["status"])
        missing = sum(row["reward"] is None for row in rows)
        # Some samples may have rewards, so the reply is no error, but says that it is not whole.
        return json_reply({"results": rows, "missing": missing}, 207 if missing else 200)

    async def _in_form(self, form: Form, request: web.Request) -> web.StreamResponse:
        asked = await read_body(request, form.read)
        return json_reply(form.answer(asked, await self._outcomes(asked)))

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        with self._under_way():
            return await passed_on(self._proxy, request)

    async def _stream(self, request: web.Request, asked: ScoreRequest) -> web.StreamResponse:
        """Reply with a line for each outcome, when it is known."""
        self._check_room(len(asked.samples))
        # A proxy such as nginx would keep the lines back otherwise.
        response = web.StreamResponse(headers={"Content-Type": LINES, "X-Accel-Buffering": "no"})
        await response.prepare(request)
        some, lines = asyncio.Event(), list[bytes]()

        def tell(number: int, outcome: Outcome) -> None:
            lines.append(orjson.dumps({**_row(asked.samples[number], outcome), "number": number}) + b"\n")
            some.set()

        def ended(judging: asyncio.Future[Sequence[Outcome]]) -> None:
            if not judging.cancelled() and (error := judging.exception()) is not None:
                for number in range(len(asked.samples)):
                    tell(number, _failed(error))
            some.set()

        # The servers of a source may have to start first, and the caller wants signs of life.
        judging = asyncio.ensure_future(self._outcomes(asked, tell))
        judging.add_done_callback(ended)
        try:
            while not judging.done() or lines:
                with anyio.move_on_after(SIGN_OF_LIFE_S):
                    await some.wait()
                some.clear()
                part, lines[:] = b"".join(lines), []
                await written(request, response, part or b"\n")
            await written(request, response, None)
        except ConnectionError:
            pass
        finally:
            await cancel_futures([judging])
        return response

    async def _outcomes(
        self, asked: ScoreRequest, tell: Callable[[int, Outcome], None] | None = None
    ) -> Sequence[Outcome]:
        """Score the samples. `tell` gets the number and the outcome of each as soon as it is known; without it, all are
        returned.
        """

        def ended(number: int, future: asyncio.Future[Outcome]) -> None:
            if tell is not None and not future.cancelled():
                tell(number, _outcome(future))

        futures = await self._submit(asked)
        try:
            for number, future in enumerate(futures):
                future.add_done_callback(partial(ended, number))
            await asyncio.gather(*futures, return_exceptions=True)
            return list(map(_outcome, futures)) if tell is None else []
        finally:
            await cancel_futures(futures)

    async def _submit(self, asked: ScoreRequest) -> Sequence[asyncio.Future[Outcome]]:
        """Submit the samples; return a future for each. Raises `Refused` if the server is full or stops."""
        count = len(asked.samples)
        with self._under_way(count):
            futures: Sequence[asyncio.Future[Outcome]]
            if asked.together and not asked.single:
                score_each = self._engine.score_each
                futures = await score_each(asked.samples, deadline_s=asked.deadline_s, priority=asked.priority)
            else:
                score = partial(self._engine.score, deadline_s=asked.deadline_s, priority=asked.priority)
                futures = [asyncio.ensure_future(score(sample)) for sample in asked.samples]
            # From here on, each is under way until it has its outcome.
            self._add(count)
            for future in futures:
                future.add_done_callback(lambda _: self._add(-1))
        return futures

    # What is under way

    def _check_room(self, count: int) -> None:
        """Raise `Refused` if so many more samples may not come now."""
        if self._draining:
            detail = "the server is about to stop; send this to another one"
            raise Refused(503, "closed", detail, retry_after_s=RETRY_AFTER_S)
        most = f"{self._max_samples:,} (max_samples of RewardServer)"
        if count > self._max_samples:
            raise Refused(413, "too_many", f"a request has at most so many samples: {most}")
        if self.under_way + count > self._max_samples:
            detail = f"{self.under_way:,} samples are under way; at most so many may be: {most}"
            raise Refused(429, "busy", detail, retry_after_s=RETRY_AFTER_S)

    @contextmanager
    def _under_way(self, count: int = 1) -> Iterator[None]:
        """Count samples, or a call of a client, as under way. Raises `Refused`."""
        self._check_room(count)
        self._add(count)
        try:
            yield
        finally:
            self._add(-count)

    def _add(self, count: int) -> None:
        self.under_way += count
        if self.under_way:
            self._idle.clear()
        else:
            self._idle.set()

    # The server itself

    def _facts_now(self) -> ServerFacts:
        config = self._engine.config
        if self._known_facts is None or self._known_facts[0] is not config:
            self._known_facts = config, facts_of(self._engine)
        return self._known_facts[1]

    async def _facts(self, _: web.Request) -> web.Response:
        return json_reply(self._facts_now().as_row())

    async def _health(self, _: web.Request) -> web.Response:
        return json_reply({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        states = {name: source.state for name, source in self._engine.statistics().sources.items()}
        usable = any(not upstream.health.unusable for upstream in self._engine.upstreams.values())
        status = "draining" if self._draining else "ready" if usable else "all sources are out"
        return json_reply({"status": status, "sources": states}, 200 if status == "ready" else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        try:
            from .exposition import exposition
        except ModuleNotFoundError:
            detail = "metrics need prometheus_client: pip install 'qreward-plugins[server]'"
            raise Refused(501, "unavailable", detail) from None
        text = exposition(self._engine.statistics(), self.under_way, self._requests)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    @web.middleware
    async def _answer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Check the sender, turn errors into replies, and count."""
        response: web.StreamResponse
        try:
            if request.path not in OPEN_PATHS:
                self._access.check(request)
                await arrived(request)
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


_HTTP_DETAIL = {
    404: "unknown path; docs/server.md of qreward-plugins lists them",
    405: "rewards are asked for with POST",
    413: "the body is too large; send fewer samples in a request, or raise max_body_bytes of RewardServer",
}


def _outcome(future: asyncio.Future[Outcome]) -> Outcome:
    """Return the outcome of a sample. A bug costs this sample and not its request."""
    try:
        return future.result()
    except Exception as error:
        return _failed(error)


def _row(sample: Sample, outcome: Outcome) -> dict[str, Any]:
    """Return the row of a sample. A value that JSON cannot hold costs this sample and not its request."""
    try:
        return result_of(sample, outcome)
    except Exception as error:
        return result_of(sample, _failed(error))


def _failed(error: BaseException) -> Failed:
    if isinstance(error, BudgetSpent):
        return Failed(Cause.INFRA, "budget", str(error))
    reason = "closed" if isinstance(error, (EngineError, Refused)) else "bug"
    if reason == "bug":
        _log.error("a sample could not be scored", exc_info=error)
    return Failed(Cause.INFRA, reason, f"the server's engine raised {type(error).__name__}")


_ASKING = {"priority"}
"""Keys of a judge that say when it is asked, not what it says."""
_CANNOT_MATTER = frozenset(
    {"url", "base_url", "api_key", "api_key_env", "verify_tls", "client", "httpx", "routing", "workers"}
    | {"max_reply_bytes", "data_parallel", "devices", "placement", "start_within_s", "restarts"}
    | {"log_folder"}
)
"""Keys of a source that say where, with which key and how fast it is asked. Any other key counts, unknown ones too,
except those of every source (`limits`, `timeouts`, `price`, `weight`).
"""


def facts_of(engine: RewardEngine) -> ServerFacts:
    """Return the facts of the configuration that an engine works by."""
    known = engine.facts()
    return ServerFacts(
        fingerprint_of(engine.config),
        tuple(known.components),
        known.defines_correct,
        engine.stream_window,
        compares_siblings(engine.config),
    )


def fingerprint_of(config: Config) -> str:
    """Return a short text that is equal for configurations with the same judges and the same questions to the sources.
    URLs, secrets, limits, prices, time limits, priorities and everything below `engine` may differ.
    """
    identity: dict[str, Any] = {
        "version": __version__,
        "judges": {name: judge.model_dump(mode="json", exclude=_ASKING) for name, judge in config.judges.items()},
        "routes": [(pattern, route.judge) for pattern, route in routes_of(config)],
        "sources": {
            configured_name(name): (source.kind, source.version, _what_counts(source))
            for name, source in config.sources.items()
        },
    }
    text = orjson.dumps(identity, default=repr, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(text).hexdigest()[:32]


def _what_counts(source: SourceConfig) -> dict[str, Any]:
    return {key: value for key, value in own_settings(source, reveal=False).items() if key not in _CANNOT_MATTER}
