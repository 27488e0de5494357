"""Messages over a stream socket: four bytes of length, then JSON."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import anyio

from .wire import MOST_BYTES, Unreadable, dump, load

WHOLE_WITHIN_S = 10.0
"""Seconds in which the rest of a message must come, and in which a peer must take one."""


async def receive(stream: socket.socket) -> dict[str, Any] | None:
    """Return the next message; None at the end of the stream. Raises `Unreadable`, `OSError` and `TimeoutError`."""
    loop = asyncio.get_running_loop()
    header = await loop.sock_recv(stream, 4)
    if not header:
        return None

    with anyio.fail_after(WHOLE_WITHIN_S):
        head = header + await _exactly(stream, 4 - len(header))
        length = int.from_bytes(head, "big")
        if not 0 < length <= MOST_BYTES:
            raise Unreadable(f"a message of {length:,} bytes")
        body = await _exactly(stream, length)
    return load(body)


async def send(stream: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message. Raises `OSError` and `TimeoutError`. After a cancellation the stream is of no use."""
    data = dump(message)
    whole = len(data).to_bytes(4, "big") + data
    with anyio.fail_after(WHOLE_WITHIN_S):
        await asyncio.get_running_loop().sock_sendall(stream, whole)


async def _exactly(stream: socket.socket, count: int) -> bytes:
    loop, parts = asyncio.get_running_loop(), bytearray()
    while len(parts) < count:
        part = await loop.sock_recv(stream, min(count - len(parts), 2**16))
        if not part:
            raise ConnectionResetError("the stream ended in a message")
        parts += part
    return bytes(parts)
