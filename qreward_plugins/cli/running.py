"""Runs a command: consoles, signals, exit codes, and one message for each error that the user can fix."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from ..config import Config, load_config
from ..engine import RewardEngine
from ..errors import ConfigurationError, InputError, Mistake, QRewardError
from ..system.ray_actors import join_cluster

OK = 0
SOURCE_SILENT = 1
KIND_BROKEN = 1
BAD_INPUT = 2
REWARDS_MISSING = 3
BROKEN_PIPE = 141
_JOINED_AT_ONCE_S = 10.0


class _Console(Console):
    """A console that exits with code 141 when the reader of a pipe has gone. rich takes 1, which has a meaning here."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()
        raise SystemExit(BROKEN_PIPE)


OUT = _Console()
"""Standard output."""
ERRORS = _Console(stderr=True)
"""Standard error."""


def with_streams() -> None:
    """Open the null device for standard streams that the caller has closed. Python has None in their place, and a file
    that is opened later would get their number. Characters that a stream cannot encode are printed as escapes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It stays open as long as the process.
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Rollouts and verdicts have characters that the terminal's encoding may lack.
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def until_written() -> Iterator[None]:
    """Run a command and flush its output.

    If output cannot be written (the disk is full), it prints one message and exits with code 2. For a broken pipe it
    exits with code 141, as shells do. There is no traceback, not even when Python closes the streams.
    """
    try:
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
    except OSError as error:
        # The rest of the buffers is discarded, so that closing the streams does not fail again.
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
    """Print an error of this package as one message, and exit with code 2."""
    try:
        yield
    except QRewardError as error:
        say(errors, Text.assemble(("error: ", "red"), _message(error)))
        raise typer.Exit(BAD_INPUT) from None


def say(console: Console, message: str | Text) -> None:
    """Print a line without markup and without line breaks, so that it can be searched and copied."""
    console.print(message, markup=False, emoji=False, highlight=False, soft_wrap=True)


def run(command: Coroutine[Any, Any, int]) -> int:
    """Run a command in an event loop of its own, and return its exit code.

    SIGINT and SIGTERM cancel it, so that it can clean up. If it then returns no code of its own, the code is 128 plus
    the number of the signal. A second signal ends the process at once.
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


def load_own(path: Path) -> Config:
    """Load a configuration with sources of its own.

    Raises `ConfigurationError`, and for a configuration that names a reward server, too.
    """
    config = load_config(path)
    if config.engine.server is not None:
        problem = "this command needs sources and judges, and a reward server has them."
        remedy = "Run it with the file of the server."
        raise ConfigurationError([Mistake("engine.server", problem, remedy)], origin=str(path))
    return config


def open_engine(config: Config, path: Path) -> RewardEngine:
    """Open the engine of a configuration, on the Ray cluster that runs if a source is placed there.

    Errors name `path`, the file of the configuration. Raises `InputError` if a cluster is needed and none runs.
    """
    try:
        with ended_by_a_signal():
            join_ray(config, path)
            return RewardEngine(config)
    except ConfigurationError as error:
        raise ConfigurationError(error.mistakes, origin=str(path)) from None


def join_ray(config: Config, path: Path, names: Collection[str] = ()) -> None:
    """Join the Ray cluster that runs if the servers of one of the sources `names` (default: all) are placed there.

    A user of a shell cannot call `ray.init()`. Raises `InputError` if no cluster can be joined.
    """
    placed = (
        name
        for name, source in config.sources.items()
        if getattr(source, "placement", "") == "ray" and (not names or name in names)
    )
    name = next(placed, None)
    if name is None:
        return
    failed: list[ConnectionError] = []

    def join() -> None:
        try:
            join_cluster()
        except ConnectionError as error:
            failed.append(error)

    joining = threading.Thread(target=join, name="qreward-ray", daemon=True)
    joining.start()
    joining.join(_JOINED_AT_ONCE_S)
    if joining.is_alive():
        say(ERRORS, f"waiting for the Ray cluster of source {name!r} (RAY_ADDRESS, or that of this machine) ...")
        joining.join()
    if failed:
        raise InputError(f"{path}: source {name!r} has `placement: ray`, and {failed[0]}") from None


@contextmanager
def ended_by_a_signal() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process at once.

    A user's module that hangs during its import blocks the event loop, which could not handle the signals. Nothing has
    been started yet that would need to clean up.
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
