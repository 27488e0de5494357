"""The way to a reward server: one session, one token, and one rule for asking again.

Redirects are not followed, no cookies are kept, and neither proxies nor credentials of the environment are used:
samples go to the server that was named, and nowhere else.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import orjson

from ..config.source_models import server_url
from ..errors import InputError, RewardServerError
from ..secrets import one_line
from .rows import JUDGES_HEADER, LINES

_log = logging.getLogger("qreward_plugins.client")

CONNECT_WITHIN_S = 10.0
SILENT_AFTER_S = 45.0
"""A server that says nothing for so long is gone. It writes an empty line every 15 s."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_LONGEST_RETRY_S = 60.0
_LARGE_BODY_BYTES = 2**20
_MOST_ERROR_BYTES = 2**16
_DETAIL_CHARS = 500
_TRY_AGAIN = (429, 502, 503, 504)
"""Statuses of a server that takes no samples now, or of a proxy in front of one that starts."""
_REASONS = {409: "other_judges", 413: "input", 422: "input", **dict.fromkeys(_TRY_AGAIN, "unreachable")}

T = TypeVar("T")


class Again(Exception):
    """A try after which another one may go better. `after_s`: the seconds that the server names. `heard`: it has taken
    the samples.
    """

    heard = False

    def __init__(self, error: RewardServerError, after_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.after_s = error, after_s


class Connection:
    """A session with the server at `url`. The other arguments are those of `RewardClient`. Raises `InputError`."""

    def __init__(self, url: str, *, token: str | None, retry_for_s: float, fingerprint: str | None) -> None:
        try:
            self.url = server_url(url).rstrip("/")
            """The server's address, without a slash at its end."""
        except (ValueError, AttributeError) as error:
            problem = str(error) if isinstance(url, str) else f"it is a text, not {type(url).__name__}"
            raise InputError(f"the URL of the reward server: {problem}") from None
        self.name = f"the reward server at {self.url}"
        self._headers = {"Content-Type": "application/json", "Accept": LINES}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        if fingerprint is not None:
            self._headers[JUDGES_HEADER] = fingerprint
        self._retry_for_s = retry_for_s
        self._session: aiohttp.ClientSession | None = None
        self._away = False

    @asynccontextmanager
    async def reply(
        self, path: str, body: bytes | None = None, *, within_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """GET a path, or POST a body to it, and yield the reply. Raises `RewardServerError` for an error of the server;
        and `Again` for one after which the request may be sent again, or if no whole reply comes.
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
            raise Again(RewardServerError(f"{self.name} {problem} ({type(failed).__name__})")) from None

    async def _error(self, reply: aiohttp.ClientResponse) -> Exception:
        """Return the error that a reply is."""
        message = f"{self.name} answered {reply.status}: {await _detail(reply)}"
        reason = _REASONS.get(reply.status, "server_refused")
        error = RewardServerError(message, status=reply.status, reason=reason)
        return Again(error, _seconds(reply.headers.get("Retry-After"))) if reply.status in _TRY_AGAIN else error

    async def retried(self, once: Callable[[], Awaitable[T]]) -> T:
        """Return what `once` returns. It is called again after each `Again`, whose error is raised when the server has
        given no sign of life for `retry_for_s` seconds.
        """
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        heard_at = loop.time()
        while True:
            try:
                returned = await once()
                self._away = False
                return returned
            except Again as failed:
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

    async def aclose(self) -> None:
        """Close the session. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


async def _detail(reply: aiohttp.ClientResponse) -> str:
    """Return what a reply that is an error says."""
    try:
        error = orjson.loads(await reply.content.read(_MOST_ERROR_BYTES))["error"]["detail"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return "no reward server (`qreward serve`) of this version answers at this URL, and redirects are not followed"
    return one_line(str(error), _DETAIL_CHARS)


def _seconds(header: str | None) -> float:
    # Not `isdigit`, which is true for superscripts, too.
    return min(float(header), _LONGEST_RETRY_S) if header is not None and header.isdecimal() else 0.0
