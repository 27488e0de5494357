"""The listening socket of a judge server and its connections. Stopping leaves none of them open.

asyncio's own `Server` loses connections that it accepts in the same step of the loop in which it is closed: their
sockets stay open until they are garbage collected (CPython 3.10 and 3.11), which fails tests that treat warnings as
errors. So this module accepts connections itself and knows each one from the start.
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from .judge_handler import JudgeHandler
from .report import Tally

_MAX_REQUEST_BYTES = 64 * 1024 * 1024
_ACCEPTS_A_ROUND = 128
_OUT_OF_DESCRIPTORS_PAUSE_S = 0.05


class Connections(web.Server):
    """Accepts on `listener`, which it owns, from `open()` until `close()`, both on the running loop."""

    def __init__(self, listener: socket.socket, handler: JudgeHandler, tally: Tally) -> None:
        # With handler_cancellation a request ends when its client disconnects, and frees its slot.
        super().__init__(handler, request_factory=_request, handler_cancellation=True, access_log=None)
        self._listener = listener
        self._tally = tally
        self._running_loop = asyncio.get_running_loop()
        self._greetings: set[asyncio.Task[None]] = set()
        self._transports: dict[RequestHandler, asyncio.Transport] = {}
        self._closed = False

    def open(self) -> None:
        """Start to accept."""
        if not self._closed:
            self._running_loop.add_reader(self._listener, self._accept)

    async def close(self) -> None:
        """Stop accepting, abort every connection, which cancels its request, and wait until all are closed."""
        self._closed = True
        self._running_loop.remove_reader(self._listener)
        self._listener.close()
        while self._greetings or self._transports:
            for transport in self._transports.values():
                transport.abort()
            await asyncio.sleep(0)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._transports[handler] = transport
        self._tally.connected()

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._transports.pop(handler, None)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_ROUND):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                # Probably out of file descriptors. The listener stays readable, so pause before the next try.
                self._running_loop.remove_reader(self._listener)
                self._running_loop.call_later(_OUT_OF_DESCRIPTORS_PAUSE_S, self.open)
                return
            connection.setblocking(False)
            greeting = self._running_loop.create_task(self._greet(connection))
            self._greetings.add(greeting)
            greeting.add_done_callback(self._greetings.discard)

    async def _greet(self, connection: socket.socket) -> None:
        try:
            await self._running_loop.connect_accepted_socket(self, connection)
        except OSError:
            connection.close()  # the client has reset it already


def _request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=_MAX_REQUEST_BYTES)
