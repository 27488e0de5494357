"""Writing rows to `OUT.partial`, which becomes OUT when all rows are in it.

The partial file is locked while it is written: two runs that write the same file would mix their rows without a word.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ..errors import InputError
from ..samples import Outcome
from .formats import format_of
from .jsonl import as_json
from .parquet import ParquetRows
from .results import RESULT, to_result


class RowWriter(Protocol):
    """Writes rows in the order of the input. Raises `InputError` when the disk does not take one."""

    def write(self, row: Mapping[str, Any], outcome: Outcome) -> None: ...


def partial_path(out: Path) -> Path:
    """Where the rows of an unfinished run stand."""
    return out.with_name(out.name + ".partial")


@contextmanager
def open_writer(out: Path, *, source: Path) -> Iterator[RowWriter]:
    """A writer of the rows of `source`, for a pair of files that `check_rollouts` has passed.

    OUT is replaced when the context is left without an error; else the rows so far stay in the partial file, readable.
    Raises `InputError` when the partial file cannot be written, or another run is writing it.
    """
    partial = partial_path(out)
    with _open(partial, out) as file:
        rows = ParquetRows(file, source) if format_of(out) == "parquet" else _JsonRows(file)
        try:
            yield _Guarded(rows, partial)
        except BaseException:
            with suppress(Exception):  # the error that is on its way says more
                rows.finish()
            raise
        with _told(partial):
            rows.finish()
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, out)


class _Rows(Protocol):
    def write(self, row: Mapping[str, Any], outcome: Outcome) -> None: ...

    def finish(self) -> None: ...


class _Guarded:
    def __init__(self, rows: _Rows, path: Path) -> None:
        self._rows = rows
        self._path = path

    def write(self, row: Mapping[str, Any], outcome: Outcome) -> None:
        with _told(self._path):
            self._rows.write(row, outcome)


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
    """The partial file, locked and empty. It is emptied last: until the lock is held it may be another run's."""
    with _told(partial):
        file = partial.open("ab")
    try:
        if not _lock(file, partial):
            raise InputError(f"{out}: another run is writing it; wait for that one, or name another file")
        file.seek(0)
        file.truncate()
        yield file
    finally:
        with suppress(OSError):  # what counts was flushed before
            file.close()


def _lock(file: BinaryIO, partial: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A run that ended in this moment has renamed the file that was just opened.
        return os.path.samestat(os.fstat(file.fileno()), partial.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        # Some network file systems know no locks.
        return True


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
