"""Writes rows to `OUT.partial`, which is renamed to OUT when it is complete.

The partial file is locked while it is written, because two runs that write the same file would mix their rows silently.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError
from ..samples import Outcome
from .formats import format_of
from .jsonl import as_json
from .parquet import ParquetRows
from .results import RESULT, to_result


class RowWriter:
    """Writes rows in the order of the input to the partial file `path`."""

    def __init__(self, rows: ParquetRows | _JsonRows, path: Path) -> None:
        self._rows = rows
        self._path = path

    def write(self, row: Mapping[str, Any], outcome: Outcome) -> None:
        """Write a row with its outcome. Raises `InputError` if it cannot be written."""
        with _explained(self._path):
            self._rows.write(row, outcome)


def partial_path(out: Path) -> Path:
    """Return the path of the rows of an unfinished run."""
    return out.with_name(out.name + ".partial")


@contextmanager
def open_writer(out: Path, *, source: Path) -> Iterator[RowWriter]:
    """Open a writer of the rows of `source` to `out`. `check_rollouts` must have accepted both.

    When the context exits without an error, the partial file replaces `out`. After an error the rows so far stay in the
    partial file, which is readable. Raises `InputError` if the partial file cannot be written or another run writes it.
    """
    partial = partial_path(out)
    with _open(partial, out) as file:
        rows = ParquetRows(file, source) if format_of(out) == "parquet" else _JsonRows(file)
        try:
            yield RowWriter(rows, partial)
        except BaseException:
            with suppress(Exception):  # keep the original error
                rows.finish()
            raise
        with _explained(partial):
            rows.finish()
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, out)


class _JsonRows:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, row: Mapping[str, Any], outcome: Outcome) -> None:
        self._file.write(as_json({**row, RESULT: to_result(outcome)}) + b"\n")
        self._file.flush()

    def finish(self) -> None:
        self._file.flush()


@contextmanager
def _open(partial: Path, out: Path) -> Iterator[BinaryIO]:
    """Open the partial file, locked and empty. It is truncated after locking, because another run may own it."""
    with _explained(partial):
        file = partial.open("ab")
    try:
        if not _lock(file, partial):
            raise InputError(f"{out}: another run is writing it; wait for that run, or name another file")
        file.seek(0)
        file.truncate()
        yield file
    finally:
        with suppress(OSError):  # everything important was flushed before
            file.close()


def _lock(file: BinaryIO, partial: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A run that just ended may have renamed the file that was opened here.
        return os.path.samestat(os.fstat(file.fileno()), partial.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        # Some network file systems do not support locks.
        return True


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
