"""The one client of a reward server (`qreward serve`): of Python users, of `engine.server` and of reward functions.

All samples that are submitted in one step of the event loop on the same terms go in one request, and each outcome comes
back in a line of the reply as soon as it is known. What has no line yet is asked for again when the reply breaks off,
and when the server is busy or away. Scoring a sample twice gives the same outcome, and the server's journal pays for it
once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import anyio
import orjson
from anyio.from_thread import BlockingPortal, start_blocking_portal

from ..config.source_models import server_url
from ..errors import InputError, RewardServerError
from ..samples import Outcome, Sample
from ..secrets import one_line
from .rows import FACTS_PATH, JUDGES_HEADER, LINES, ServerFacts, outcome_of_row, unreadable, was_closed, written_sample

_log = logging.getLogger("qreward_plugins.client")

RETRY_FOR_S = 60.0
SAMPLES_A_REQUEST = 4096
BYTES_A_REQUEST = 8 * 2**20
"""Most samples of a request, and about its largest size. More go in several requests at the same time."""
CONNECT_WITHIN_S = 10.0
SILENT_AFTER_S = 45.0
"""A server that says nothing for so long is gone. It writes an empty line every 15 s."""
REQUEST_PAUSE_S = 1e-3
FREE_REQUESTS = 32
"""With more open requests than this, each delays the next one by `REQUEST_PAUSE_S`. So thousands of samples that come
one by one share some hundred connections."""
MARGIN = 0.05
LONGEST_MARGIN_S = 1.0
"""Part of the time left that is kept for the way back, so that the server's reason for a failure arrives in time."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_LONGEST_S = 1e9
_MOST_LINE_BYTES = 64 * 2**20
_MOST_ERROR_BYTES = 2**16
_DETAIL_CHARS = 500
_LONGEST_RETRY_S = 60.0
_TRY_AGAIN = (429, 502, 503, 504)
"""Statuses of a server that takes no samples now, or of a proxy in front of one that starts."""
_REASONS = {409: "other_judges", 413: "input", 422: "input"}
_REMEDIES = {404: "; there is no reward server (`qreward serve`) of this version at this URL"}

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Row:
    """A sample without an outcome yet. `batch`: what was submitted together has the same; None: it came alone."""

    written: bytes
    future: asyncio.Future[Outcome]
    submitted_at: float
    due_at: float
    priority: int | None
    batch: object


class RewardClient:
    """Asks a reward server from an event loop. Use it as an async context manager, or call `aclose`.

    Args:
        url: the server's address, e.g. `http://127.0.0.1:8080`.
        token: what the server expects as a bearer token.
        retry_for_s: most seconds without a sign of life, or busy, for which the server is asked again.
        fingerprint: that of the judges that the server must have (`facts`); None: any.

    Redirects are not followed, no cookies are kept, and neither proxies nor credentials of the environment are used.
    """

    def __init__(
        self, url: str, *, token: str | None = None, retry_for_s: float = RETRY_FOR_S, fingerprint: str | None = None
    ) -> None:
        try:
            self.url = server_url(url).rstrip("/")
            """The server's address, without a slash at its end."""
        except (ValueError, AttributeError) as error:
            problem = str(error) if isinstance(url, str) else f"it is a text, not {type(url).__name__}"
            raise InputError(f"the URL of the reward server: {problem}") from None
        self._headers = {"Content-Type": "application/json", "Accept": LINES}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        if fingerprint is not None:
            self._headers[JUDGES_HEADER] = fingerprint
        self._retry_for_s = retry_for_s
        self._session: aiohttp.ClientSession | None = None
        self._waiting: list[_Row] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._requests: dict[asyncio.Task[None], None] = {}
        self._away = False

    async def score(self, sample: Sample, *, deadline_s: float | None = None, priority: int | None = None) -> Outcome:
        """Score a sample as `RewardEngine.score` does. Raises what `score_all` raises."""
        return await self.submit(sample, "the sample", _due_at(deadline_s), priority=priority)

    async def score_all(
        self, samples: Iterable[Sample], *, deadline_s: float | None = None, priority: int | None = None
    ) -> list[Outcome]:
        """Score samples as one batch; outcome i belongs to sample i.

        `deadline_s` counts from this call, whatever number of tries it takes. Default: that of the server's
        configuration, for each try. Cancelling the call cancels the samples at the server.

        Raises `RewardServerError` if the server refuses the request, cannot be reached or is busy for `retry_for_s`
        seconds, or has no outcome by the deadline; and `InputError` for a sample that JSON cannot express, or an
        impossible deadline.
        """
        due_at, batch, futures = _due_at(deadline_s), object(), []
        try:
            for number, sample in enumerate(samples):
                what = f"sample {number}"
                futures.append(self.submit(sample, what, due_at, priority=priority, batch=batch))
            return [await future for future in futures]
        finally:
            for future in futures:
                future.cancel()
            await asyncio.gather(*futures, return_exceptions=True)

    def submit(
        self, sample: Sample, what: str, due_at: float, *, priority: int | None = None, batch: object = None
    ) -> asyncio.Future[Outcome]:
        """Submit a sample, which messages call `what`. The future has its outcome, or a `RewardServerError`, by
        `due_at` on the event loop's clock (infinity: the server's own deadline counts). Cancelling it cancels the
        sample, at the server as soon as no other sample of its request is wanted.

        Samples with the same `batch` are scored together. Raises `InputError` for a sample that JSON cannot express.
        """
        loop = asyncio.get_running_loop()
        row = _Row(written_sample(sample, what), loop.create_future(), loop.time(), due_at, priority, batch)
        self._waiting.append(row)
        if self._flushing is None:
            open_requests = len(self._requests)
            pause_s = 0.0 if open_requests < FREE_REQUESTS else REQUEST_PAUSE_S * open_requests
            self._flushing = loop.call_later(pause_s, self._flush)
        return row.future

    async def facts(self) -> ServerFacts:
        """Ask the server for its facts; it may still be starting. Raises `RewardServerError`."""

        async def ask() -> ServerFacts:
            timeout = aiohttp.ClientTimeout(total=CONNECT_WITHIN_S)
            async with self._opened().get(
                self.url + FACTS_PATH, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as reply:
                await self.check(reply)
                try:
                    return ServerFacts.of_row(orjson.loads(await reply.read()))
                except orjson.JSONDecodeError as error:
                    raise unreadable(error.msg) from None

        return await self.retried(ask)

    async def aclose(self) -> None:
        """Close the connections, which cancels what the server still judges. Idempotent."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        for task in self._requests:
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        waiting, self._waiting = self._waiting, []
        fail(waiting, RewardServerError("the client was closed", reason="closed"))
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> RewardClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # Called for requests

    def ask(self, rows: Sequence[_Row]) -> None:
        """Send rows in a request of their own."""
        task = asyncio.get_running_loop().create_task(_Request(self, rows).run())
        self._requests[task] = None
        task.add_done_callback(self._requests.pop)

    def post(self, body: bytes) -> Any:
        """Post a body to `/score`. Return the context manager of its reply."""
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_WITHIN_S, sock_read=SILENT_AFTER_S)
        return self._opened().post(
            f"{self.url}/score", data=body, headers=self._headers, timeout=timeout, allow_redirects=False
        )

    async def check(self, reply: aiohttp.ClientResponse) -> None:
        """Raise the error of a reply that is none: `_Again` if the request may be sent again later."""
        if reply.status == 200:
            self._away = False
            return
        status = reply.status
        detail = await _detail(reply)
        message = f"the reward server at {self.url} answered {status}: {detail}{_REMEDIES.get(status, '')}"
        error = RewardServerError(message, status=status, reason=_REASONS.get(status, "server_refused"))
        if status not in _TRY_AGAIN:
            raise error
        error.reason = "unreachable"
        raise _Again(error, after_s=_seconds(reply.headers.get("Retry-After")))

    async def retried(
        self, once: Callable[[], Awaitable[T]], on_failed: Callable[[RewardServerError], None] | None = None
    ) -> T:
        """Return what `once` returns. It is called again while the server is busy or away. `on_failed` is called with
        the error of each try, and the last one is raised after `retry_for_s` seconds.
        """
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        heard_at = loop.time()
        while True:
            try:
                return await once()
            except _Again as again:
                error, after_s, heard = again.error, again.after_s, again.heard
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as failed:
                message = f"the reward server at {self.url} cannot be reached ({type(failed).__name__})"
                error, after_s, heard = RewardServerError(message), 0.0, False
            if on_failed is not None:
                on_failed(error)
            if heard:
                heard_at, pause_s = loop.time(), _FIRST_PAUSE_S
            wait_s = max(pause_s, after_s)
            if loop.time() + wait_s > heard_at + self._retry_for_s:
                raise error
            if not self._away:
                self._away = True
                _log.warning("%s; it is asked again", error)
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _flush(self) -> None:
        self._flushing = None
        waiting, self._waiting = self._waiting, []
        requests: dict[Any, list[_Row]] = {}
        for row in waiting:
            if not row.future.done():
                # The deadlines of one step differ by what the step took.
                due = row.due_at if math.isinf(row.due_at) else round(row.due_at, 1)
                requests.setdefault((row.batch, row.priority, due), []).append(row)
        for rows in requests.values():
            for part in _parts(rows):
                self.ask(part)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
            )
        return self._session


class _Again(Exception):
    """A try after which another one may go better. `after_s`: the seconds that the server names; `heard`: it has taken
    the samples.
    """

    def __init__(self, error: RewardServerError, *, after_s: float = 0.0, heard: bool = False) -> None:
        super().__init__(str(error))
        self.error, self.after_s, self.heard = error, after_s, heard


class _Request:
    """Rows that go in one request, which is sent again until each has its outcome."""

    def __init__(self, client: RewardClient, rows: Sequence[_Row]) -> None:
        self._client = client
        self._rows = dict(enumerate(rows))
        """Rows without a line yet, by their number in the request."""
        self._due_at = min(row.due_at for row in rows)
        self._submitted_at = min(row.submitted_at for row in rows)
        self._why: RewardServerError | None = None
        """Why the last try failed; None while the server works on the rows."""

    async def run(self) -> None:
        """Give each row its outcome or its error. Cancelling ends the request, and its rows fail."""
        error = RewardServerError("the client was closed", reason="closed")
        task = asyncio.current_task()
        assert task is not None, "it runs in a task"
        look = partial(self._look, task)
        for row in self._rows.values():
            row.future.add_done_callback(look)
        try:
            with anyio.CancelScope(deadline=self._due_at):
                await self._client.retried(self._once, self._failed)
            waited_s = asyncio.get_running_loop().time() - self._submitted_at
            message = f"the reward server at {self._client.url} had no outcome after {waited_s:.1f} s"
            error = self._why or RewardServerError(message, reason="deadline")
        except RewardServerError as refused:
            error = refused
        finally:
            fail(self._rows.values(), error)

    def _failed(self, error: RewardServerError) -> None:
        self._why = error

    def _look(self, task: asyncio.Task[None], future: asyncio.Future[Outcome]) -> None:
        """End the request if nobody wants its rows any more."""
        if future.cancelled() and self._rows and not self._wanted():
            self._rows.clear()
            task.cancel()

    def _wanted(self) -> bool:
        return not all(row.future.done() for row in self._rows.values())

    async def _once(self) -> None:
        """Send the rows that have no line yet, and read their lines."""
        self._rows = dict(enumerate(row for row in self._rows.values() if not row.future.done()))
        heard = False
        try:
            async with self._client.post(self._body()) as reply:
                if reply.status == 413 and len(self._rows) > 1:
                    self._split()
                    return
                await self._client.check(reply)
                if reply.content_type != LINES:
                    raise unreadable(f"it is of type {one_line(reply.content_type, 60)}")
                heard, self._why = True, None
                await self._read(reply)
            if self._wanted():
                raise aiohttp.ClientPayloadError("outcomes are missing")
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as failed:
            if not heard:
                raise
            message = f"the reward server at {self._client.url} broke off its reply ({type(failed).__name__})"
            raise _Again(RewardServerError(message), heard=True) from None

    async def _read(self, reply: aiohttp.ClientResponse) -> None:
        """Take the lines of a reply, until its end or until nobody wants what is left."""
        async for line in _lines(reply.content):
            try:
                answered = orjson.loads(line)
                row = self._rows[answered["number"]]
                if was_closed(answered):
                    continue
            except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
                raise unreadable(type(error).__name__) from None
            del self._rows[answered["number"]]
            if not row.future.done():
                latency_s = asyncio.get_running_loop().time() - row.submitted_at
                try:
                    row.future.set_result(outcome_of_row(answered, latency_s=latency_s))
                except RewardServerError as error:
                    row.future.set_exception(error)
            if self._rows and not self._wanted():
                return

    def _body(self) -> bytes:
        rows = list(self._rows.values())
        asked: dict[str, Any] = {
            "samples": [orjson.Fragment(row.written) for row in rows],
            "priority": rows[0].priority,
            "together": rows[0].batch is not None,
        }
        if math.isfinite(self._due_at):
            left_s = max(1e-3, self._due_at - asyncio.get_running_loop().time())
            asked["deadline_s"] = min(_LONGEST_S, left_s - min(LONGEST_MARGIN_S, MARGIN * left_s))
        return orjson.dumps(asked)

    def _split(self) -> None:
        """Send the rows, of which the server does not take so many at once, in two requests."""
        rows, self._rows = list(self._rows.values()), {}
        middle = len(rows) // 2
        self._client.ask(rows[:middle])
        self._client.ask(rows[middle:])


class BlockingRewardClient:
    """The same for code without an event loop, from any number of threads. Use it as a context manager."""

    def __init__(self, url: str, *, token: str | None = None, retry_for_s: float = RETRY_FOR_S) -> None:
        self._client = RewardClient(url, token=token, retry_for_s=retry_for_s)
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None

    def score(self, sample: Sample, *, deadline_s: float | None = None, priority: int | None = None) -> Outcome:
        """Score a sample; see `RewardClient.score`. Blocks the calling thread."""
        return self._opened().call(partial(self._client.score, sample, deadline_s=deadline_s, priority=priority))

    def score_all(
        self, samples: Iterable[Sample], *, deadline_s: float | None = None, priority: int | None = None
    ) -> list[Outcome]:
        """Score samples; see `RewardClient.score_all`. Blocks the calling thread."""
        score_all = partial(self._client.score_all, list(samples), deadline_s=deadline_s, priority=priority)
        return self._opened().call(score_all)

    def facts(self) -> ServerFacts:
        """Ask the server for its facts; see `RewardClient.facts`. Blocks the calling thread."""
        return self._opened().call(self._client.facts)

    def __enter__(self) -> BlockingRewardClient:
        self._portal = self._stack.enter_context(start_blocking_portal())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._opened().call(self._client.aclose)
        finally:
            self._portal = None
            self._stack.close()

    def _opened(self) -> BlockingPortal:
        if self._portal is None:
            raise RewardServerError("open the client first: `with BlockingRewardClient(url) as client:`")
        return self._portal


def fail(rows: Iterable[_Row], error: RewardServerError) -> None:
    """Fail the rows that have no outcome. Each gets an error of its own, because raising one changes it."""
    for row in rows:
        if not row.future.done():
            row.future.set_exception(RewardServerError(str(error), status=error.status, reason=error.reason))


def _due_at(deadline_s: float | None) -> float:
    if deadline_s is None:
        return math.inf
    if not 0 < deadline_s < math.inf:
        raise InputError("deadline_s must be a number of seconds above 0")
    return asyncio.get_running_loop().time() + deadline_s


def _parts(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """Split rows into requests of bounded size."""
    part: list[_Row] = []
    size = 0
    for row in rows:
        if part and (len(part) >= SAMPLES_A_REQUEST or size + len(row.written) > BYTES_A_REQUEST):
            yield part
            part, size = [], 0
        part.append(row)
        size += len(row.written)
    if part:
        yield part


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a reply that are not empty. aiohttp's own iterator bounds a line at 128 KiB."""
    begun = b""
    async for piece in content.iter_any():
        *lines, begun = (begun + piece).split(b"\n")
        for line in lines:
            if line:
                yield line
        if len(begun) > _MOST_LINE_BYTES:
            raise unreadable(f"a line is longer than {_MOST_LINE_BYTES:,} bytes")


async def _detail(reply: aiohttp.ClientResponse) -> str:
    """Return what a reply that is an error says."""
    if 300 <= reply.status < 400:
        place = one_line(reply.headers.get("Location", "").partition("?")[0], 200)
        return f"it redirects to {place}; redirects are not followed, so set the URL of the server itself"
    try:
        error = orjson.loads(await reply.content.read(_MOST_ERROR_BYTES))["error"]["detail"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return "no explanation"
    return one_line(str(error), _DETAIL_CHARS)


def _seconds(header: str | None) -> float:
    # Not `isdigit`, which is true for superscripts, too.
    return min(float(header), _LONGEST_RETRY_S) if header is not None and header.isdecimal() else 0.0
