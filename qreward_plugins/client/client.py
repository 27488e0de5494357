"""The one client of a reward server (`qreward serve`): of Python users, of `engine.server` and of reward functions.

All samples that are submitted in one step of the event loop on the same terms go in one request, and each outcome comes
back in a line of the reply as soon as it is known. What has no line yet is asked for again when the reply breaks off,
and when the server is busy or away. Scoring a sample twice gives the same outcome, and the server's journal pays for it
once.

Redirects are not followed, no cookies are kept, and neither proxies nor credentials of the environment are used:
samples go to the server that was named, and nowhere else.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import anyio
import orjson

from ..config.source_models import server_url
from ..errors import InputError, RewardServerError
from ..samples import Outcome, Sample
from ..secrets import one_line
from ..system.threads import cancel_futures
from .rows import FACTS_PATH, JUDGES_HEADER, LINES, ServerFacts, outcome_of_row, unreadable, was_closed, written_sample

_log = logging.getLogger("qreward_plugins.client")

RETRY_FOR_S = 60.0
SAMPLES_A_REQUEST = 4096
BYTES_A_REQUEST = 8 * 2**20
"""Most samples of a request, and about its largest size, both exceeded by a group at most. More go in several requests
at the same time.
"""
FACTS_WITHIN_S = 10.0
REQUEST_PAUSE_S = 1e-3
FREE_REQUESTS = 32
"""With more open requests than this, each delays the next one by `REQUEST_PAUSE_S`. So thousands of samples that come
one by one share some hundred connections."""
MARGIN = 0.05
LONGEST_MARGIN_S = 1.0
"""Part of the time left that is kept for the way back, so that the server's reason for a failure arrives in time."""
_LONGEST_S = 1e9
_MOST_LINE_BYTES = 64 * 2**20
CONNECT_WITHIN_S = 10.0
SILENT_AFTER_S = 45.0
"""A server that says nothing for so long is gone. It writes an empty line every 15 s."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_LONGEST_RETRY_S = 60.0
_LARGE_BODY_BYTES = 2**20
_MOST_BODY_BYTES = 2**20
_DETAIL_CHARS = 500
_TRY_AGAIN = (429, 502, 503, 504)
"""Statuses of a server that takes no samples now, or of a proxy in front of one that starts."""
_REASONS = {409: "other_judges", 413: "input", 422: "input", **dict.fromkeys(_TRY_AGAIN, "unreachable")}

T = TypeVar("T")


class _Again(Exception):
    """A try after which another one may go better. `after_s`: the seconds that the server names. `heard`: it has taken
    the samples.
    """

    heard = False

    def __init__(self, error: RewardServerError, after_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.after_s = error, after_s


@dataclass(eq=False, slots=True)
class _Row:
    """A sample without an outcome yet. `batch`: what was submitted together has the same; None: it came alone. `group`:
    the samples of one have the same, and go in one request, because a judge may compare them.
    """

    group: object
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

    Raises `InputError` for a wrong URL.
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
        self._name = f"the reward server at {self.url}"
        self._headers = {"Content-Type": "application/json", "Accept": LINES}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        if fingerprint is not None:
            self._headers[JUDGES_HEADER] = fingerprint
        self._retry_for_s = retry_for_s
        self._session: aiohttp.ClientSession | None = None
        self._away = False
        self._waiting: list[_Row] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._requests: set[asyncio.Task[None]] = set()

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
        impossible deadline; and `TypeError` for a single sample.
        """
        if isinstance(samples, Sample):
            raise TypeError("score_all takes several samples; call score for one")
        due_at, batch, futures = _due_at(deadline_s), object(), []
        try:
            for number, sample in enumerate(samples):
                what = f"sample {number}"
                futures.append(self.submit(sample, what, due_at, priority=priority, batch=batch))
            return [await future for future in futures]
        finally:
            await cancel_futures(futures)

    def submit(
        self, sample: Sample, what: str, due_at: float, *, priority: int | None = None, batch: object = None
    ) -> asyncio.Future[Outcome]:
        """Submit a sample, which messages call `what`. The future has its outcome, or a `RewardServerError`, by
        `due_at` on the event loop's clock (infinity: the server's own deadline counts). Cancelling it cancels the
        sample, at the server as soon as no other sample of its request is wanted.

        Samples with the same `batch` are scored together. Raises `InputError` for a sample that JSON cannot express.
        """
        loop = asyncio.get_running_loop()
        group, written = sample.group_id or object(), written_sample(sample, what)
        row = _Row(group, written, loop.create_future(), loop.time(), due_at, priority, batch)
        self._waiting.append(row)
        if self._flushing is None:
            pause_s = 0.0 if len(self._requests) < FREE_REQUESTS else REQUEST_PAUSE_S * len(self._requests)
            self._flushing = loop.call_later(pause_s, self._flush)
        return row.future

    async def facts(self) -> ServerFacts:
        """Ask the server for its facts; it may still be starting. Raises `RewardServerError`."""

        async def ask() -> ServerFacts:
            async with self._reply(FACTS_PATH, within_s=FACTS_WITHIN_S) as reply:
                written = await _whole(reply)
            try:
                return ServerFacts.of_row(orjson.loads(written))
            except orjson.JSONDecodeError as error:
                raise unreadable(error.msg) from None

        return await self._retried(ask)

    async def aclose(self) -> None:
        """Close the connections, which cancels what the server still judges. Idempotent."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        waiting, self._waiting = self._waiting, []
        fail(waiting, _closed())
        await cancel_futures(list(self._requests))
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> RewardClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

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
                task = _Request(self, part).task
                self._requests.add(task)
                task.add_done_callback(self._requests.discard)

    # The way to the server

    @asynccontextmanager
    async def _reply(
        self, path: str, body: bytes | None = None, *, within_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """GET a path, or POST a body to it, and yield the reply. Raises `RewardServerError` for an error of the server;
        and `_Again` for one after which the request may be sent again, or if no whole reply comes.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
            )
        timeout = aiohttp.ClientTimeout(within_s, sock_connect=CONNECT_WITHIN_S, sock_read=SILENT_AFTER_S)
        method, url, problem = "GET" if body is None else "POST", self.url + path, "cannot be reached"
        # aiohttp warns of large bodies that are bytes.
        data = io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY_BYTES else body
        try:
            async with self._session.request(
                method, url, data=data, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as reply:
                if reply.status != 200:
                    raise await self._error(reply)
                problem = "broke off its reply"
                yield reply
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as failed:
            raise _Again(RewardServerError(f"{self._name} {problem} ({type(failed).__name__})")) from None

    async def _error(self, reply: aiohttp.ClientResponse) -> Exception:
        """Return the error that a reply is."""
        message = f"{self._name} answered {reply.status}: {await _detail(reply)}"
        reason = _REASONS.get(reply.status, "server_refused")
        error = RewardServerError(message, status=reply.status, reason=reason)
        return _Again(error, _seconds(reply.headers.get("Retry-After"))) if reply.status in _TRY_AGAIN else error

    async def _retried(self, once: Callable[[], Awaitable[T]]) -> T:
        """Return what `once` returns. It is called again after each `_Again`, whose error is raised when the server has
        given no sign of life for `retry_for_s` seconds.
        """
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        heard_at = loop.time()
        while True:
            try:
                returned = await once()
                self._away = False
                return returned
            except _Again as failed:
                again = failed
            if again.heard:
                self._away = False
                heard_at, pause_s = loop.time(), _FIRST_PAUSE_S
            wait_s = max(pause_s, again.after_s)
            if loop.time() + wait_s > heard_at + self._retry_for_s:
                raise again.error
            if not self._away:
                self._away = True
                most = f" for up to {self._retry_for_s:g} s" if math.isfinite(self._retry_for_s) else ""
                remedy = "" if again.error.status else "; start it with `qreward serve`, or correct its URL"
                _log.warning("%s; it is asked again%s%s", again.error, most, remedy)
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Request:
    """Rows that go in one request, which is sent again until each has its outcome."""

    def __init__(self, client: RewardClient, rows: Sequence[_Row]) -> None:
        self._client = client
        self._rows = dict(enumerate(rows))
        """Rows without a line yet, by their number in the request."""
        self._due_at = min(row.due_at for row in rows)
        self._submitted_at = min(row.submitted_at for row in rows)
        self._heard = False
        """Whether the last try brought an outcome or a sign of life."""
        self._why: RewardServerError | None = None
        """Why the last try failed; None while the server works on the rows."""
        self.task = asyncio.get_running_loop().create_task(self._run())
        """Gives each row its outcome or its error."""
        # A task that is cancelled before its first step runs nothing of `_run`.
        self.task.add_done_callback(lambda _: fail(self._rows.values(), _closed()))
        for row in rows:
            row.future.add_done_callback(self._look)

    async def _run(self) -> None:
        error = RewardServerError(f"{self._client._name}: unexpected error; see the log", reason="bug")
        try:
            with anyio.CancelScope(deadline=self._due_at):
                await self._client._retried(self._once)
            waited_s = asyncio.get_running_loop().time() - self._submitted_at
            message = f"{self._client._name} had no outcome after {waited_s:.1f} s"
            error = self._why or RewardServerError(message, reason="deadline")
        except RewardServerError as refused:
            error = refused
        except Exception:
            _log.exception("a request to a reward server failed with an unexpected error")
        fail(self._rows.values(), error)

    def _look(self, future: asyncio.Future[Outcome]) -> None:
        """End the request if nobody wants its rows any more."""
        if future.cancelled() and self._rows and not self._wanted():
            self._rows.clear()
            self.task.cancel()

    def _wanted(self) -> bool:
        return not all(row.future.done() for row in self._rows.values())

    async def _once(self) -> None:
        """Send the rows that have no line yet, and read their lines."""
        self._rows = dict(enumerate(row for row in self._rows.values() if not row.future.done()))
        self._heard = False
        try:
            async with self._client._reply("/score", self._body()) as reply:
                if reply.content_type != LINES:
                    raise unreadable(f"it is of type {one_line(reply.content_type, 60)}")
                self._why = None
                await self._read(reply)
                if self._wanted():
                    raise aiohttp.ClientPayloadError("outcomes are missing")
        except _Again as again:
            if not self._wanted():
                return
            self._why, again.heard = again.error, self._heard
            raise

    async def _read(self, reply: aiohttp.ClientResponse) -> None:
        """Take the lines of a reply, until its end or until nobody wants what is left."""
        async for line in _lines(reply.content):
            if not line:
                self._heard = True
                continue
            try:
                answered = orjson.loads(line)
                number = answered["number"]
                row = self._rows[number]
                if was_closed(answered):
                    continue
                latency_s = asyncio.get_running_loop().time() - row.submitted_at
                outcome = outcome_of_row(answered, latency_s=latency_s)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise unreadable(error) from None
            del self._rows[number]
            self._heard = True
            if not row.future.done():
                row.future.set_result(outcome)
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


def _closed() -> RewardServerError:
    return RewardServerError("the client was closed", reason="closed")


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
    """Split rows into requests of bounded size, between groups."""
    part: list[_Row] = []
    size, places = 0, dict[object, int]()
    for row in sorted(rows, key=lambda row: places.setdefault(row.group, len(places))):
        is_full = len(part) >= SAMPLES_A_REQUEST or size + len(row.written) > BYTES_A_REQUEST
        if part and is_full and row.group != part[-1].group:
            yield part
            part, size = [], 0
        part.append(row)
        size += len(row.written)
    if part:
        yield part


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a reply; an empty one is a sign of life. aiohttp's own iterator bounds a line at 128 KiB."""
    begun = b""
    async for piece in content.iter_any():
        *lines, begun = (begun + piece).split(b"\n")
        for line in lines:
            yield line
        if len(begun) > _MOST_LINE_BYTES:
            raise unreadable(f"a line is longer than {_MOST_LINE_BYTES:,} bytes")


async def _whole(reply: aiohttp.ClientResponse) -> bytes:
    """Return the body of a reply without lines. Raises `RewardServerError` for a longer one."""
    try:
        await reply.content.readexactly(_MOST_BODY_BYTES)
    except asyncio.IncompleteReadError as whole:
        return whole.partial
    raise unreadable(f"it is longer than {_MOST_BODY_BYTES:,} bytes")


async def _detail(reply: aiohttp.ClientResponse) -> str:
    """Return what a reply that is an error says."""
    try:
        error = orjson.loads(await _whole(reply))["error"]["detail"]
    except (RewardServerError, orjson.JSONDecodeError, LookupError, TypeError):
        return "no reward server (`qreward serve`) of this version answers at this URL, and redirects are not followed"
    return one_line(str(error), _DETAIL_CHARS)


def _seconds(header: str | None) -> float:
    # Not `isdigit`, which is true for superscripts, too.
    return min(float(header), _LONGEST_RETRY_S) if header is not None and header.isdecimal() else 0.0
