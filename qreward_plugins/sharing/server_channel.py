"""The connection to a keeper over a reward server (`qreward serve`).

Each report is one POST, which the server answers when the keeper does. Reloads of the configuration are not shared over
HTTP: a configuration may name code to load, and the token of a server is no permission to run code elsewhere.

A server that cannot be reached may be alive for others, so shares expire as with any silent keeper.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os

import aiohttp

from ..config import SharedServer
from ..config.served import server_token
from ..errors import KeeperSilent
from .messages import Answer, Report
from .wire import MOST_BYTES, Unreadable, dump, load, read_answer, write_report

_log = logging.getLogger("qreward_plugins.sharing")

PATH = "/limits"
_CONNECT_WITHIN_S = 5.0
_REPLY_WITHIN_S = 15.0
"""Longer than a report counts (`TTL_S`)."""
_DETAIL_CHARS = 200


class ServerChannel:
    """The `Channel` to the keeper of a reward server at `url`."""

    def __init__(self, url: str, *, token: str | None = None, verify_tls: bool = True) -> None:
        self.kept_by = ""
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._verify_tls = verify_tls
        self._session: aiohttp.ClientSession | None = None
        self._pid = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._logged = ""

    @classmethod
    def of(cls, settings: SharedServer) -> ServerChannel:
        """Open the channel of a configuration. Raises `ConfigurationError` if the token is missing."""
        token = server_token(settings.token_env, "engine.shared_server")
        return cls(settings.url, token=token, verify_tls=settings.verify_tls)

    async def exchange(self, report: Report) -> Answer | None:
        if self._session is None and report.leaves:
            return None
        reply = await self._post(dump({"report": write_report(report._replace(revision=None))}))
        try:
            answer = reply.get("answer")
            self.kept_by = f"the reward server at {self._url}"
            return None if answer is None else read_answer(answer)
        except Unreadable as error:
            raise KeeperSilent(f"the reward server at {self._url} sent an unreadable answer ({error})") from None

    async def describe(self) -> str:
        """Return who keeps the limits. Raises `KeeperSilent`."""
        reply = await self._post(dump({"status": True}))
        return f"shared over the reward server at {self._url}: {str(reply.get('status'))[:_DETAIL_CHARS]}"

    async def end_keeper(self) -> None:
        """Nothing is ended from here: the server's keeper works for others, too."""

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None and self._pid == os.getpid():
            # The connections of a closed loop have closed with it, and a session can be closed in another loop.
            await session.close()

    async def _post(self, data: bytes) -> dict[str, object]:
        # A stream, because aiohttp warns of large bytes.
        stream = io.BytesIO(data)
        timeout = aiohttp.ClientTimeout(total=_REPLY_WITHIN_S, sock_connect=_CONNECT_WITHIN_S)
        try:
            async with self._opened().post(
                self._url + PATH, data=stream, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as reply:
                body = await reply.content.read(MOST_BYTES + 1)
                while len(body) <= MOST_BYTES and (more := await reply.content.read(MOST_BYTES + 1 - len(body))):
                    body += more
                status = reply.status
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            name = type(error).__name__
            if isinstance(error, aiohttp.ClientSSLError):
                name += "; does it speak http, not https?"
            message = f"the reward server at {self._url}, which keeps the limits, cannot be reached ({name})"
            if not self.kept_by:
                self._log_once(logging.WARNING, message)
            raise KeeperSilent(message) from None
        try:
            content = load(body)
        except Unreadable:
            content = {}
        if status == 200:
            return content
        why = content.get("error")
        detail = str(why.get("detail"))[:_DETAIL_CHARS] if isinstance(why, dict) else "no explanation"
        message = f"the reward server at {self._url}, which keeps the limits, answered {status}: {detail}"
        if 400 <= status < 500:
            # It will not pass by itself.
            self._log_once(logging.ERROR, message)
        raise KeeperSilent(message)

    def _log_once(self, level: int, message: str) -> None:
        """Log why nothing is sent. Before the first answer, the membership logs a failure at level INFO only."""
        if message != self._logged:
            self._logged = message
            _log.log(level, "%s; no request is sent to sources with limits", message)

    def _opened(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is not None and self._pid == os.getpid() and self._loop is not loop:
            self._session.detach()
        if self._session is None or self._pid != os.getpid() or self._loop is not loop:
            connector = aiohttp.TCPConnector(limit=4, ssl=self._verify_tls)
            self._session, self._pid, self._loop = aiohttp.ClientSession(connector=connector), os.getpid(), loop
        return self._session
