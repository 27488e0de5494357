"""How a command runs and ends: signals, exit codes, and one message for whatever the user can mend."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from ..config import Config
from ..engine import RewardEngine
from ..errors import ConfigurationError, QRewardError

OK = 0
SOURCE_SILENT = 1
KIND_BROKEN = 1
BAD_INPUT = 2
REWARDS_MISSING = 3
BROKEN_PIPE = 141


@contextmanager
def until_written() -> Iterator[None]:
    """Run a command to its end, the last byte of its output included.

    Output that cannot be written (a full disk, a reader that has gone) is one message and exit code 2, or 141 for a
    broken pipe as shells have it, and no traceback: not even when Python closes the streams.
    """
    try:
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
    except OSError as error:
        # Whatever is left in the buffers has nowhere to go.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if error.errno != errno.EPIPE:
            with suppress(OSError):
                os.write(2, f"error: the output cannot be written ({error.strerror})\n".encode())
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                os.dup2(nowhere, stream.fileno())
        raise SystemExit(BROKEN_PIPE if error.errno == errno.EPIPE else BAD_INPUT) from None


@contextmanager
def one_message(errors: Console) -> Iterator[None]:
    """Turn an error of ours into its message and exit code 2."""
    try:
        yield
    except QRewardError as error:
        say(errors, Text.assemble(("error: ", "red"), _message(error)))
        raise typer.Exit(BAD_INPUT) from None


def say(console: Console, message: str | Text) -> None:
    """Print a line as it is: nothing in it is markup, and it is not broken, so that it can be searched and copied."""
    console.print(message, markup=False, emoji=False, highlight=False, soft_wrap=True)


def run(command: Coroutine[Any, Any, int]) -> int:
    """Run a command in an event loop of its own, and return its exit code.

    SIGINT and SIGTERM cancel it, so that it can end in order; if it gives no code of its own then, the code is 128 plus
    the signal's number. A second signal ends the process at once.
    """
    return asyncio.run(_until_signal(command))


async def _until_signal(command: Coroutine[Any, Any, int]) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(command)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        remove()
        task.cancel()

    def remove() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
    finally:
        remove()


def _message(error: QRewardError) -> str:
    if isinstance(error, ConfigurationError) and len(error.mistakes) == 1:
        return f"{error.origin}: {error.mistakes[0]}".replace(": (top level):", ":", 1)
    return str(error)


def open_engine(config: Config, path: Path) -> RewardEngine:
    """The engine of a configuration that came from `path`, which is named in errors."""
    try:
        with _ended_by_a_signal():
            return RewardEngine(config)
    except ConfigurationError as error:
        raise ConfigurationError(error.mistakes, origin=str(path)) from None


@contextmanager
def _ended_by_a_signal() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process at once. A user's module that hangs while it is imported holds up the
    event loop, which could never act on them. Nothing is begun yet that would have to end in order.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
