"""The connection of an engine to a reward server: a WebSocket that is opened again whenever it breaks.

Samples stay with the caller of this module until they have an outcome. After a break all of them are sent again; the
server's journal answers what was judged already. Pings notice a machine that vanished without a word.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import aiohttp
import anyio
import orjson

from ..errors import RewardServerError
from .facts import ServerFacts, facts_of, redirected

_log = logging.getLogger("qreward_plugins.remote")

PATH = "/engine"
HEARTBEAT_S = 10.0
"""Seconds of silence after which the server is asked for a sign of life; it has half as many to answer."""
FACTS_WITHIN_S = 10.0
MOST_FRAME_BYTES = 64 * 2**20
"""Size of the largest frame that is read. A server of ours sends smaller ones."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_CLOSE_WITHIN_S = 2.0
_FINAL = (400, 401, 403, 404, 413, 422)
"""Statuses that another try does not change."""


class Listener(Protocol):
    """Called with what happens to the connection, in its event loop."""

    def connected(self) -> None:
        """The server takes samples: send all that have no outcome."""
        ...

    def disconnected(self, why: str) -> None:
        """The server cannot be reached now."""
        ...

    def refused(self, reason: str, detail: str) -> None:
        """The server will not answer this engine."""
        ...

    def answered(self, row: Mapping[str, Any]) -> None:
        """A sample has an outcome."""
        ...

    def put_off(self, ids: Iterable[int], status: int, detail: str, after_s: float) -> None:
        """The server refused these samples for now."""
        ...

    def room(self, count: int) -> None:
        """The server takes so many samples now."""
        ...


class Link:
    """Keeps a connection open while `wanted()` is true, and breaks it no more often than it must.

    Args:
        url, token: those of the server.
        facts: the first facts of the server. Another fingerprint is refused, unless `any_judges`.
        connect_s: most seconds to connect.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        facts: ServerFacts,
        *,
        connect_s: float,
        any_judges: bool,
        listener: Listener,
        wanted: Callable[[], bool],
    ) -> None:
        self._url = url
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._facts = facts
        self._connect_s = connect_s
        self._any_judges = any_judges
        self._listener = listener
        self._wanted = wanted
        self._needed = asyncio.Event()
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self.open = False
        """Whether the server takes samples now."""

    def need(self) -> None:
        """Open the connection if it is not open."""
        self._needed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, frame: Mapping[str, Any]) -> None:
        """Send a frame if the connection is open. What is lost with the connection is sent again by `connected`."""
        if self.open:
            self._outgoing.put_nowait(orjson.dumps(frame))

    async def aclose(self) -> None:
        """Close the connection, which cancels what the server still judges."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s)
        # `ws_connect` has no option for it.
        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(_refuse_redirect)
        async with aiohttp.ClientSession(
            timeout=timeout, trace_configs=[tracing], cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            pause_s = _FIRST_PAUSE_S
            while True:
                await self._needed.wait()
                try:
                    was_open = await self._connection(session)
                    why = "the connection broke"
                except _Refused as refused:
                    self._listener.refused(refused.reason, str(refused))
                    was_open, why = False, str(refused)
                except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as failed:
                    was_open, why = False, f"it cannot be reached ({type(failed).__name__})"
                self._listener.disconnected(why)
                if not self._wanted():
                    self._needed.clear()
                pause_s = _FIRST_PAUSE_S if was_open else min(2 * pause_s, _LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s)

    async def _connection(self, session: aiohttp.ClientSession) -> bool:
        """Serve one connection until it breaks. Return whether the server took samples."""
        try:
            # The system accepts connections for a process that hangs, and a machine may vanish before it answers.
            with anyio.fail_after(self._connect_s + FACTS_WITHIN_S):
                socket = await session.ws_connect(
                    self._url + PATH,
                    headers=self._headers,
                    heartbeat=HEARTBEAT_S,
                    max_msg_size=MOST_FRAME_BYTES,
                    compress=0,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_WITHIN_S),
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in _FINAL:
                remedy = "; see engine.server.token_env" if error.status == 401 else ""
                raise _Refused("server_refused", f"it answered {error.status}{remedy}") from None
            raise
        async with socket:
            self._check(await socket.receive(FACTS_WITHIN_S))
            self._outgoing = asyncio.Queue()
            sending = asyncio.get_running_loop().create_task(self._send_all(socket, self._outgoing))
            try:
                self.open = True
                self._listener.connected()
                async for message in socket:
                    self._take(message)
                return True
            finally:
                self.open = False
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    @staticmethod
    async def _send_all(socket: Any, outgoing: asyncio.Queue[bytes]) -> None:
        try:
            while True:
                await socket.send_frame(await outgoing.get(), aiohttp.WSMsgType.TEXT)
        except (aiohttp.ClientError, OSError):
            await socket.close()

    def _check(self, message: Any) -> None:
        try:
            self._check_facts(_frame(message)["facts"])
        except RewardServerError as error:
            raise _Refused("server_refused", f"{error}") from None
        except (LookupError, TypeError, ValueError) as error:
            raise _unreadable(error) from None

    def _check_facts(self, row: Mapping[str, Any]) -> None:
        facts = facts_of(row)
        if facts.fingerprint != self._facts.fingerprint and not self._any_judges:
            raise _Refused(
                "other_judges",
                "its judges, routes or models have changed since this run began, so that its rewards could not be "
                "compared; start the run anew, give the server its former configuration, or set "
                "engine.server.judges_may_change",
            )

    def _take(self, message: Any) -> None:
        if message.type is not aiohttp.WSMsgType.TEXT:
            return
        try:
            frame = _frame(message)
            for row in frame.get("outcomes", ()):
                self._listener.answered(row)
            if "put_off" in frame:
                off = frame["put_off"]
                self._listener.put_off(off["ids"], off["status"], off["detail"], off["after_s"])
            if "room" in frame:
                self._listener.room(_count(frame["room"]))
            if "facts" in frame:
                self._check_facts(frame["facts"])
        except (LookupError, TypeError, ValueError, RewardServerError) as error:
            raise _unreadable(error) from None


async def _refuse_redirect(_: object, __: object, params: aiohttp.TraceRequestRedirectParams) -> None:
    params.response.close()
    raise _Refused("server_refused", redirected(params.response.headers.get("Location", "")))


def _frame(message: Any) -> Mapping[str, Any]:
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise ConnectionResetError("the server closed the connection")
    frame = orjson.loads(message.data)
    if not isinstance(frame, Mapping):
        raise RewardServerError("a frame is no object")
    return frame


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("room")
    return value


class _Refused(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def _unreadable(error: Exception) -> _Refused:
    return _Refused("server_refused", f"it sent a frame that cannot be read ({type(error).__name__})")
