"""How a command runs and ends: signals, exit codes, and one message for whatever the user can mend."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
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
BAD_INPUT = 2
REWARDS_MISSING = 3


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
        return RewardEngine(config)
    except ConfigurationError as error:
        raise ConfigurationError(error.mistakes, origin=str(path)) from None
