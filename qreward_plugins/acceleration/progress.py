"""The progress bar of a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_of(name: str, total: int, shown: bool | None) -> Iterator[Callable[[], None] | None]:
    """Show a bar on stderr while the context is open; yields what to call for each end. `shown`: None shows it only on
    a terminal.
    """
    if shown is False or (shown is None and not sys.stderr.isatty()) or not total:
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(name.replace("[", r"\["), total=total)
        yield lambda: progress.advance(task)
