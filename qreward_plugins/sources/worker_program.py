"""The program of a worker process: it loads the function once, and then runs one call after the other.

It does not use `multiprocessing`, for two reasons. A `multiprocessing` child imports the trainer's main script again
(seconds of torch and ray, or even a second training run). And a daemonic child may not have children of its own, which
reward functions that run code need.

A message is its length (8 bytes, big endian), one byte for its kind, and a pickle. Parent and function are trusted: the
function is the user's own.
"""

from __future__ import annotations

import inspect
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from ..errors import InvalidReply, SourceError
from ..system.functions import describe, is_transient, why_not_loaded

END_WITHIN_S = 2.0
"""Seconds that a worker has to end by itself after the parent has closed the channel. If the parent is dead: none."""
_LOOK_EVERY_S = 0.02

HEADER = struct.Struct("!Qc")
CALL = b"c"
"""To the worker: first the loader, then the arguments of each call."""
VALUE = b"v"
"""The function's value."""
RAISED = b"r"
"""A description of the function's exception."""
TRANSIENT = b"t"
"""The same for an exception after which another try may help (a time-out, a lost connection)."""
OURS = b"o"
"""An error of this package that the function raised, pickled."""
UNFIT = b"u"
"""Why the arguments or the value cannot be carried between processes, as a text."""


def main(descriptor: int) -> None:
    """Serve the parent at the socket `descriptor` until the parent closes it."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    # Children of the function must not keep the channel open: the parent detects a crash by its end.
    os.register_at_fork(after_in_child=channel.close)
    threading.Thread(target=_die_with_parent, args=(channel.fileno(), parent), daemon=True).start()
    # Not `makefile`, which would keep the channel open in those children.
    with open(descriptor, "rb", closefd=False) as messages, suppress(EOFError, OSError):
        # It ends when the parent closes the channel, or has died.
        function = _load(channel, messages)
        while function is not None:
            kind, payload = _answer(function, _receive(messages))
            channel.sendall(HEADER.pack(len(payload), kind) + payload)


def _load(channel: socket.socket, messages: BinaryIO) -> Callable[..., Any] | None:
    message = _receive(messages)
    try:
        loader = pickle.loads(message)
        function: Callable[..., Any] = loader()
    except BaseException as error:
        payload = pickle.dumps(why_not_loaded(error))
        channel.sendall(HEADER.pack(len(payload), RAISED) + payload)
        return None
    channel.sendall(HEADER.pack(0, VALUE))
    return function


def _answer(function: Callable[..., Any], message: bytes) -> tuple[bytes, bytes]:
    try:
        args, kwargs = pickle.loads(message)
    except Exception as error:
        return UNFIT, pickle.dumps(f"the arguments cannot be unpickled in the worker: {describe(error)}")
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        return _of_exception(error)
    if inspect.iscoroutine(value):
        value.close()
        return UNFIT, pickle.dumps("it returned a coroutine; define the function with `async def`")
    try:
        return VALUE, pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        problem = f"its value, of type {type(value).__name__}, cannot be pickled: {describe(error)}"
        return UNFIT, pickle.dumps(problem)


def _of_exception(error: BaseException) -> tuple[bytes, bytes]:
    if isinstance(error, (SourceError, InvalidReply)):
        return OURS, pickle.dumps(error)
    return TRANSIENT if is_transient(error) else RAISED, pickle.dumps(describe(error))


def _receive(messages: BinaryIO) -> bytes:
    length, _ = HEADER.unpack(_exactly(messages, HEADER.size))
    return _exactly(messages, length)


def _exactly(messages: BinaryIO, count: int) -> bytes:
    received = messages.read(count)
    if len(received) < count:
        raise EOFError
    return received


def _die_with_parent(descriptor: int, parent: int) -> None:
    # An idle worker ends by itself when its parent dies. A worker whose call hangs would run for ever, and so would
    # the processes that it started.
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()
    ends_at = time.monotonic() + END_WITHIN_S
    # The concurrency of a dead process is soon given to others (`MARGIN_S` in sharing/keeper.py).
    while os.getppid() == parent and time.monotonic() < ends_at:
        time.sleep(_LOOK_EVERY_S)
    os.killpg(0, signal.SIGKILL)
