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

from ..errors import InvalidReply, SampleRefused, SourceError, TransientError
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
"""Why there is no value: a `SourceError` or `InvalidReply`, whose message continues the name of the function. From the
loader: a text.
"""
COROUTINE = "returned a coroutine; define it with `async def`"


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
        return _refused(f"got arguments that cannot be unpickled in the worker: {describe(error)}")
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        return RAISED, pickle.dumps(failure_of(error))
    if inspect.iscoroutine(value):
        value.close()
        return _refused(COROUTINE)
    try:
        return VALUE, pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return _refused(f"returned a value of type {type(value).__name__}, which cannot be pickled: {describe(error)}")


def _refused(problem: str) -> tuple[bytes, bytes]:
    return RAISED, pickle.dumps(SampleRefused(problem, reason="raised"))


def failure_of(error: BaseException) -> SourceError | InvalidReply:
    """Return what an exception of a function means: errors of this package keep their class, and after a time-out or a
    lost connection another try may help.
    """
    problem = f"raised {describe(error)}"
    if isinstance(error, (SourceError, InvalidReply)):
        error.args = (problem,)
        return error.with_traceback(None)
    return TransientError(problem) if is_transient(error) else SampleRefused(problem, reason="raised")


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
