"""A judge server on loopback that behaves like a provider, with limits, latency and faults.

It has its own thread and event loop. So it serves sync tests, any event loop and worker processes, and a client that
blocks its own loop cannot slow the server.

    with JudgeServer(lambda call: 0.5, limits=ServerLimits(requests_per_minute=600)) as server:
        ...  # point a source to server.base_url
        assert server.report().violations_total == 0
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeout
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import TYPE_CHECKING, TypedDict, TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from ..simulation.clock import finish
from ..system.processes import process_pool, terminate
from .faults import Faults, Latency
from .judge_calls import overlap_score
from .judge_handler import JudgeHandler, Scorer
from .limits import ServerLimits
from .protocols.services import SCORE_PATH
from .report import Report, Tally

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

T = TypeVar("T")

_MAX_REQUEST_BYTES = 64 * 1024 * 1024
_TIMEOUT_S = 60.0
"""Longest wait for the process of a `JudgeServerProcess` to start, or to report."""
_BACKLOG = 4096
_ROUNDS_TO_CONNECT = 3
"""Rounds of the loop in which an accepted socket becomes a connection."""


class Settings(TypedDict, total=False):
    """The keyword arguments of a `JudgeServer`, beside its address; the defaults are those of `JudgeHandler`."""

    limits: ServerLimits
    latency: Latency
    faults: Faults
    models: Sequence[str]
    protocols: Sequence[str]
    api_key: str | Sequence[str] | None
    seed: int
    streams: bool
    stream_interval_s: float


class ProcessSettings(Settings, total=False):
    """The keyword arguments of a `JudgeServerProcess`."""

    host: str
    port: int


class JudgeServerError(RuntimeError):
    """The judge server's address is taken, it is not running, or `wait_for` timed out."""


class _Server(ABC):
    """What a judge server is in whatever process: its addresses, and `with`, which starts and stops it."""

    @property
    @abstractmethod
    def base_url(self) -> str:
        """The address of all dialects: "http://127.0.0.1:PORT/v1". Raises `JudgeServerError` before it has a port."""

    @property
    def root_url(self) -> str:
        """The address for reward models: "http://127.0.0.1:PORT". Raises like `base_url`."""
        return self.base_url.removesuffix("/v1")

    @property
    def score_url(self) -> str:
        """The address for scoring requests: "http://127.0.0.1:PORT/score". Raises like `base_url`."""
        return self.root_url + SCORE_PATH

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        # It takes a millisecond, which needs no worker thread.
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.stop()


class JudgeServer(_Server):
    """A judge that speaks OpenAI's chat completions (POST /v1/chat/completions) and responses (/v1/responses),
    Anthropic's messages (/v1/messages) and Gemini (/v1beta/models/MODEL:generateContent, also below /v1), each streamed
    if asked (Gemini: `:streamGenerateContent?alt=sse`). GET /v1/models, GET /v1beta/models and GET /health. It also
    scores samples: POST /score, with the body of slime's remote reward model: `{"prompt": text or messages,
    "response": text, "label": anything}`. And it serves a reward model as vLLM (/classify, /pooling, /score), SGLang
    (/classify, /v1/embeddings), TEI (/predict) and OpenRLHF (/get_reward) do, with lists of texts. Such a request
    counts once against the limits. As a sandbox it answers POST /run_code in the form of SandboxFusion, and runs
    nothing: `score` gets a `RunCall`, and returns what the program prints, or a whole reply (`ran`).

    `protocols` are those that it serves, of "openai", "responses", "anthropic" and "gemini"; the first one writes the
    list of models at /v1/models. Default: all. A call has the messages and parameters of chat completions, whatever the
    protocol of its request is.

    `score` gets a `JudgeCall` and returns one of these; it may be async:

    - a float, which becomes the verdict `{"id": nonce, "score": ..., "rationale": ...}`; requested criteria get the
      same number,
    - a mapping, which becomes a verdict with the id added,
    - a str, which becomes the content unchanged.

    For a scoring request `score` gets a `ScoreCall`, a `JudgeCall` with the same blocks, and the reply is the number,
    the mapping or the str itself. Each text of a request to a reward model is a `ScoreCall`, too: its `response` is the
    rendered conversation, or the response if the server gets prompt and response as two texts; a number is its logit, a
    mapping has a logit for each label. Where a judge lists several responses, `score` is asked about each of them. A
    scorer that raises `PlayFault` plays a fault for the whole request. Async scorers run on the server's loop; sync
    ones block it, so they must not wait. Another exception of the scorer becomes an HTTP 500 and is in the report.

    `with` and `async with` start and stop it. All methods are thread-safe. It can be restarted after `stop()`, on the
    same port and with its counts: clients see a server that was down for a while. With `port=0` (the
    default) the system picks a free port at the first start. `seed` fixes the drawn latencies and faults. With an
    `api_key`, a request without it gets a 401. Of several keys each has its own limits, and `revoke` ends one. Keys are
    in no repr, report or log. A stream has one event for each token, every
    `stream_interval_s` seconds; without `streams`, a request for one gets a 400.
    """

    def __init__(
        self,
        score: Scorer = overlap_score,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        **settings: Unpack[Settings],
    ) -> None:
        self._host = host
        self._port = port
        self._handler = JudgeHandler(score, self._elapsed_s, **settings)
        self._tally = self._handler.tally
        self._first_start_s: float | None = None
        self._control = threading.RLock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped"
        return f"<JudgeServer {self._host}:{self._port} {state}>"

    @property
    def running(self) -> bool:
        return self._thread is not None

    @property
    def port(self) -> int:
        """The port it listens on, or listened on last. Raises `JudgeServerError` before a first start with `port=0`."""
        if not self._port:
            raise JudgeServerError("this judge server has no port yet: start() it first")
        return self._port

    @property
    def base_url(self) -> str:
        return f"http://{self._host}:{self.port}/v1"

    def start(self) -> None:
        """Listen, and return once connections are accepted. Does nothing if it runs. Raises `JudgeServerError`."""
        with self._control:
            if self._thread is not None:
                return
            listener = self._listen()
            self._port = listener.getsockname()[1]
            ready = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(listener, ready), name="qreward-judge-server", daemon=True
            )
            self._thread.start()
            ready.wait()

    def stop(self) -> None:
        """Close every connection, end hangs, and join the thread. Idempotent. The scorer must not call it."""
        with self._control:
            thread = self._thread
            if thread is None:
                return
            self._on_loop(self._stopping.set)
            thread.join()
            self._thread = None

    def report(self) -> Report:
        """A snapshot of the server's counts."""
        return self._tally.snapshot(self._elapsed_s())

    def wait_for(self, predicate: Callable[[Report], bool], *, timeout_s: float = 10.0) -> Report:
        """Block until the predicate holds for the report, e.g. `lambda report: report.in_flight == 8`, and return it.

        Raises `JudgeServerError` with the report after `timeout_s` seconds. On an event loop: `await
        asyncio.to_thread(server.wait_for, predicate)`.
        """
        report = self._tally.wait_for(predicate, self._elapsed_s, timeout_s)
        if report is None:
            raise JudgeServerError(f"the condition did not hold within {timeout_s:g} s; the report is {self.report()}")
        return report

    def hold(self) -> None:
        """Hold all answers until `release()`, so that a test can look at the requests in flight."""
        self._handler.held = True

    def revoke(self, api_key: str) -> None:
        """Refuse this key from now on, with a 401. Raises `ValueError` for a key that the server does not have."""
        self._handler.revoke(api_key)

    def release(self) -> None:
        """Release the held answers, and stop holding."""
        self._handler.held = False
        self._on_loop(self._handler.open_gate)

    def _elapsed_s(self) -> float:
        # The clock of asyncio loops, read without a loop, because other threads ask for reports.
        return 0.0 if self._first_start_s is None else time.monotonic() - self._first_start_s

    def _listen(self) -> socket.socket:
        try:
            if self._port > 65_535:
                raise OSError("ports end at 65535")
            listener = socket.create_server((self._host, self._port), backlog=_BACKLOG)
        except OSError as error:
            problem = os.strerror(error.errno) if error.errno else str(error)
            raise JudgeServerError(
                f"the judge server cannot listen on {self._host}:{self._port}: {problem}; use another port or address"
            ) from error
        listener.setblocking(False)
        return listener

    def _on_loop(self, action: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
                self._loop.call_soon_threadsafe(action)

    def _run(self, listener: socket.socket, ready: threading.Event) -> None:
        # Not the process's preferred loop: faults need the sockets, which other loops hide.
        loop = asyncio.SelectorEventLoop()
        try:
            loop.run_until_complete(self._serve(listener, ready))
        finally:
            finish(loop)

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        if self._first_start_s is None:
            self._first_start_s = time.monotonic()
        self._handler.open_gate()
        connections = _Connections(self._handler, self._tally)
        server = await self._loop.create_server(connections, sock=listener)
        ready.set()
        await self._stopping.wait()
        # An asyncio server loses connections that it accepts while it closes. So it closes when all are there.
        self._loop.remove_reader(listener)
        for _ in range(_ROUNDS_TO_CONNECT):
            await asyncio.sleep(0)
        while connections.transports:
            for transport in connections.transports.values():
                transport.abort()
            await asyncio.sleep(0)
        server.close()


class _Connections(web.Server):
    """The open connections. With `handler_cancellation` a request ends when its client disconnects, and frees its
    slot.
    """

    def __init__(self, handler: JudgeHandler, tally: Tally) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            handler,
            request_factory=lambda message, payload, protocol, writer, task: web.BaseRequest(
                message, payload, protocol, writer, task, loop, client_max_size=_MAX_REQUEST_BYTES
            ),
            handler_cancellation=True,
            access_log=None,
        )
        self._tally = tally
        self.transports: dict[RequestHandler, asyncio.Transport] = {}

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.transports[handler] = transport
        self._tally.count("connections")

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.transports.pop(handler, None)


class JudgeServerProcess(_Server):
    """A `JudgeServer` in a spawned process, with the same arguments, so that its CPU time is not measured with the
    client's. All must be picklable, so `score` must be a module-level function.

    Raises `JudgeServerError` if the server cannot start or its process has died. The process ends with its parent.
    """

    def __init__(self, score: Scorer = overlap_score, **settings: Unpack[ProcessSettings]) -> None:
        self._score = score
        self._settings = settings
        self._pool: ProcessPoolExecutor | None = None
        self._base_url: str | None = None
        self._pid = 0

    @property
    def base_url(self) -> str:
        if self._base_url is None:
            raise JudgeServerError("this judge server has no port yet: start() it first")
        return self._base_url

    @property
    def pid(self) -> int:
        """The process id, to stop or kill it. Raises `JudgeServerError` if it does not run."""
        if self._pool is None:
            raise JudgeServerError("the judge server's process is not running: start() it first")
        return self._pid

    def start(self) -> None:
        """Spawn the process and return once connections are accepted. Does nothing if it runs."""
        if self._pool is not None:
            return
        self._pool = process_pool(1)
        try:
            self._base_url, self._pid = self._ask(_start, self._score, self._settings)
        except BaseException:
            self.stop()
            raise

    def report(self) -> Report:
        """A snapshot of the server's counts."""
        return self._ask(_report)

    def stop(self) -> None:
        """Stop the server and its process. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            terminate(pool)
            pool.shutdown()

    def _ask(self, function: Callable[..., T], *arguments: object) -> T:
        """What a function returns in the process."""
        if self._pool is None:
            raise JudgeServerError("the judge server's process is not running: start() it first")
        try:
            return self._pool.submit(function, *arguments).result(_TIMEOUT_S)
        except BrokenProcessPool as error:
            raise JudgeServerError("the process of the judge server has died") from error
        except FuturesTimeout:
            raise JudgeServerError(f"the process of the judge server did not answer within {_TIMEOUT_S:g} s") from None


_SERVERS: list[JudgeServer] = []
"""The server of this process, if it is that of a `JudgeServerProcess`."""


def _start(score: Scorer, settings: ProcessSettings) -> tuple[str, int]:
    server = JudgeServer(score, **settings)
    server.start()
    _SERVERS.append(server)
    return server.base_url, os.getpid()


def _report() -> Report:
    return _SERVERS[0].report()
