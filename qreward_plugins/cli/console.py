"""What every command prints on, ends with and stops at: consoles, exit codes, signals, and numbers in few characters.

It imports no engine: `qreward --help` loads this module.
"""

from __future__ import annotations

import asyncio
import datetime
import errno
import io
import math
import os
import signal
import sys
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError, InputError, QRewardError

OK = 0
CHECK_FAILED = 1
BAD_INPUT = 2
REWARDS_MISSING = 3
_MEASURED_WIDTH = 1_000
STYLES = {"up": "green", "paused": "yellow", "held": "yellow", "down": "yellow", "degraded": "red", "unusable": "red"}
"""Of the states of a source."""

Journals: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="JOURNAL...", help="Journals: files of engine.journal.path, or directories.")
]
"""The argument of commands that read journals."""
Where: TypeAlias = Annotated[
    str, typer.Option(metavar="SQL", help="Only samples with an entry like this, e.g. 'step >= 100'.")
]
Overwrite: TypeAlias = Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")]


OUT = Console()
"""Standard output."""
ERRORS = Console(stderr=True)
"""Standard error."""


@contextmanager
def until_written() -> Iterator[None]:
    """Run a command and flush its output. Characters that a stream cannot encode are printed as escapes.

    If output cannot be written (the disk is full), it prints one message and exits with code 2; if the reader of a pipe
    has gone, it exits with 1. There is no traceback, not even when Python closes the streams.
    """
    streams = (sys.stdout, sys.stderr)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            # Rollouts and verdicts have characters that the terminal's encoding may lack.
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            for stream in streams:
                stream.flush()
    except OSError as error:
        # The rest of the buffers is discarded, so that closing the streams does not fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        is_broken_pipe = error.errno == errno.EPIPE
        if not is_broken_pipe:
            with suppress(OSError):
                os.write(2, f"error: the output cannot be written ({error.strerror})\n".encode())
        for stream in streams:
            with suppress(OSError):
                os.dup2(nowhere, stream.fileno())
        raise SystemExit(CHECK_FAILED if is_broken_pipe else BAD_INPUT) from None


@contextmanager
def one_message() -> Iterator[None]:
    """Print an error of this package as one message, and exit with code 2."""
    try:
        yield
    except QRewardError as error:
        say(ERRORS, Text.assemble(("error: ", "red"), _message(error)))
        raise typer.Exit(BAD_INPUT) from None


@contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """A file beside `out`, which replaces it when it is complete. Raises `InputError` if it cannot be written."""
    target = Path(os.path.realpath(out))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror or error})") from None
    finally:
        partial.unlink(missing_ok=True)


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


def seconds(value: float | None) -> str:
    """Format seconds with three digits: "0.42s", "12.3s", "123s"; "-" for None."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}s"


def number(value: float | None) -> str:
    """Format a number with four digits; "-" for None and NaN."""
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


def clock(value: float | None) -> str:
    """Format seconds as "h:mm:ss"; "?" for None."""
    return "?" if value is None else str(datetime.timedelta(seconds=round(value)))


def short(count: float) -> str:
    """Format a count in at most six characters: "999", "12.3k", "4.5M"; "-" for infinity."""
    if count == math.inf:
        return "-"
    for limit, unit, divisor in ((9_999.5, "", 1), (999_950, "k", 1e3), (999_950_000, "M", 1e6)):
        if count < limit:
            return f"{count / divisor:.1f}{unit}" if unit else f"{count:.0f}"
    return f"{count / 1e9:.1f}G"


def number_of(count: int, noun: str) -> str:
    """ "1 source", "2 sources"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def table(*columns: str, left: Collection[str] = (), folds: Collection[str] = (), title: str | None = None) -> Table:
    """A table without lines. Columns hold numbers, those in `left` words, and those in `folds` words over lines."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1), pad_edge=False)
    for name in columns:
        if name in folds:
            made.add_column(name, overflow="fold")
        else:
            made.add_column(name, no_wrap=True, justify="left" if name in left else "right")
    return made


def print_whole(console: Console, shown: Table, *, widest: int = 120) -> None:
    """Print a table as wide as it is, up to `widest` columns: in a narrow terminal it wraps, and no number is cut."""
    needed = Measurement.get(console, console.options.update(width=_MEASURED_WIDTH), shown).maximum
    if needed > console.width:
        shown.width = max(console.width, min(needed, widest))
    console.print(shown, crop=False)
