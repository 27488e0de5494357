"""Clients of the reward server (`qreward serve`): the outcomes of an engine that runs in another process.

They send every sample to `/score`, and return the `Outcome` that the engine there returned, so that code that used an
engine goes on as before. A request that got no reply is sent again: scoring a sample twice gives the same outcome, and
a journal pays for it once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import aiohttp
import orjson
from anyio.from_thread import BlockingPortal, start_blocking_portal

from ..config.source_models import server_url
from ..errors import InputError, RewardServerError
from ..samples import Outcome, Sample
from .facts import FACTS_PATH, facts_of, redirected
from .rows import outcome_of_row, row_of_sample, rows_of, was_closed

SAMPLES_A_REQUEST = 512
"""Most samples that one request holds; more are sent in several requests at the same time."""
RETRY_FOR_S = 60.0
REPLY_WITHIN_S = 5.0
"""Seconds after the deadline of its samples for which a reply of the server is waited for."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_CONNECT_WITHIN_S = 10.0
_SHORTEST_DEADLINE_S = 1e-3
_CONNECTIONS = 64
_TRY_AGAIN = (429, 503)
"""Statuses of a server that takes no samples now: its queue is full, or it is about to stop."""


class RewardClient:
    """Asks a reward server from an event loop. Use it as an async context manager, or call `aclose`.

    Args:
        url: the server's address, e.g. `http://127.0.0.1:8080`.
        token: what the server expects as a bearer token.
        retry_for_s: most seconds in all for which a request is kept back because the server cannot be reached or is
            busy. The time in which the server works on it does not count.
    """

    def __init__(self, url: str, *, token: str | None = None, retry_for_s: float = RETRY_FOR_S) -> None:
        try:
            self._url = server_url(url).rstrip("/")
        except (ValueError, AttributeError) as error:
            problem = str(error) if isinstance(url, str) else f"it is a text, not {type(url).__name__}"
            raise InputError(f"the URL of the reward server: {problem}") from None
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._retry_for_s = retry_for_s
        self._session: aiohttp.ClientSession | None = None
        self._default_s: float | None = None

    @property
    def url(self) -> str:
        """The server's address, without a slash at its end."""
        return self._url

    async def score(self, sample: Sample, *, deadline_s: float | None = None, priority: int | None = None) -> Outcome:
        """Score a sample as `RewardEngine.score` does. Raises what `score_all` raises."""
        return (await self.score_all([sample], deadline_s=deadline_s, priority=priority))[0]

    async def score_all(
        self, samples: Iterable[Sample], *, deadline_s: float | None = None, priority: int | None = None
    ) -> list[Outcome]:
        """Score samples; outcome i belongs to sample i.

        `deadline_s` counts from this call, whatever number of tries it takes. Default: that of the server's
        configuration, for each try. Cancelling the call cancels the samples at the server.

        Raises `RewardServerError` if the server refuses the request, cannot be reached or is busy for `retry_for_s`
        seconds, or has not replied `REPLY_WITHIN_S` after the deadline; and `InputError` for a sample that JSON cannot
        express, or a deadline that is none.
        """
        if deadline_s is not None and not 0 < deadline_s < math.inf:
            raise InputError("deadline_s must be a number of seconds above 0")
        rows = [row_of_sample(sample, f"sample {number}") for number, sample in enumerate(samples)]
        deadline_at = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        parts = [rows[start : start + SAMPLES_A_REQUEST] for start in range(0, len(rows), SAMPLES_A_REQUEST)]
        asked = [asyncio.ensure_future(self._ask(part, deadline_at, priority)) for part in parts]
        try:
            return [outcome for part in asked for outcome in await part]
        finally:
            for part in asked:
                part.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> RewardClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _ask(
        self, rows: Sequence[Mapping[str, Any]], deadline_at: float | None, priority: int | None
    ) -> list[Outcome]:
        loop, kept_back_s, pause_s = asyncio.get_running_loop(), 0.0, _FIRST_PAUSE_S
        outcomes: dict[int, Outcome] = {}
        left = list(range(len(rows)))
        while True:
            began_at, wait_s = loop.time(), pause_s
            left_s = None if deadline_at is None else max(_SHORTEST_DEADLINE_S, deadline_at - began_at)
            error: RewardServerError | None = None
            final = False
            try:
                limit_s = await self._server_deadline_s() if left_s is None else left_s
                asked = [rows[number] for number in left]
                data = orjson.dumps({"samples": asked, "deadline_s": left_s, "priority": priority})
                async with self._post(data, limit_s) as reply:
                    answer, status = await reply.read(), reply.status
                    wait_s = max(pause_s, _seconds(reply.headers.get("Retry-After")))
                if status in (200, 207):
                    answered = rows_of(answer, len(left))
                    outcomes |= {number: outcome_of_row(row) for number, row in zip(left, answered, strict=True)}
                    # A server that stops has no outcome for some. The next one may.
                    left = [number for number, row in zip(left, answered, strict=True) if was_closed(row)]
                    if not left:
                        break
                else:
                    message = f"the reward server at {self._url} answered {status}: {_detail(reply, answer)}"
                    error, final = RewardServerError(message, status=status), status not in _TRY_AGAIN
            except RewardServerError as refused:
                error, final = refused, refused.status not in _TRY_AGAIN
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as failed:
                message = f"the reward server at {self._url} cannot be reached ({type(failed).__name__})"
                error = RewardServerError(message)
                silent = isinstance(failed, aiohttp.ServerTimeoutError)
                if isinstance(failed, aiohttp.ClientConnectorError) or silent:
                    kept_back_s += loop.time() - began_at
                # It has not even kept its own deadline, so it is gone, or it hangs.
                final = isinstance(failed, asyncio.TimeoutError) and not silent and left_s is None
            kept_back_s += wait_s
            too_late = deadline_at is not None and loop.time() + wait_s >= deadline_at
            if final or too_late or kept_back_s > self._retry_for_s:
                if error is not None:
                    raise error
                break
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return [outcomes[number] for number in range(len(rows))]

    async def _server_deadline_s(self) -> float:
        """Return the deadline of the server's configuration, in seconds. Without it, the client of a machine that
        vanished would wait for ever.
        """
        if self._default_s is None:
            timeout = aiohttp.ClientTimeout(total=_CONNECT_WITHIN_S, sock_connect=_CONNECT_WITHIN_S)
            async with self._opened().get(
                self._url + FACTS_PATH, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as reply:
                answer = await reply.read()
                if reply.status != 200:
                    raise RewardServerError(
                        f"the reward server at {self._url} answered {reply.status}: {_detail(reply, answer)}",
                        status=reply.status,
                    )
            try:
                facts = orjson.loads(answer)
            except orjson.JSONDecodeError as error:
                raise RewardServerError(f"the facts of the reward server cannot be read: {error.msg}") from None
            self._default_s = facts_of(facts).deadline_s
        return self._default_s

    def _post(self, data: bytes, limit_s: float) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=limit_s + REPLY_WITHIN_S, sock_connect=_CONNECT_WITHIN_S)
        return self._opened().post(
            f"{self._url}/score", data=data, headers=self._headers, timeout=timeout, allow_redirects=False
        )

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session


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


def _detail(reply: aiohttp.ClientResponse, answer: bytes) -> str:
    if 300 <= reply.status < 400:
        return redirected(reply.headers.get("Location", ""))
    try:
        return str(orjson.loads(answer)["error"]["detail"])[:500]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return "no explanation"


def _seconds(header: str | None) -> float:
    # Not `isdigit`, which is true for superscripts, too.
    return float(header) if header is not None and header.isdecimal() else 0.0
