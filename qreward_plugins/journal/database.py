"""Opens the journal's SQLite file, and explains its errors in one sentence.

The file is in WAL mode: readers never wait for a writer, and a killed process leaves at worst an incomplete tail that
SQLite ignores. With `synchronous=NORMAL` a commit needs no disk flush; a power failure may lose the last commits, but
does not damage the file. The application id protects databases of other programs from being written.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from ..errors import JournalError
from .entries import COLUMNS

SCHEMA_VERSION: Final = 8

BUSY_TIMEOUT_S: Final = 5.0
"""Longest wait for another process that writes, in seconds."""

_APPLICATION_ID: Final = 0x71526A31

_HEADER_BYTES: Final = 100
_MAGIC: Final = b"SQLite format 3\0"

_CREATE: Final = (
    "CREATE TABLE outcomes (id INTEGER PRIMARY KEY, "
    + ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    + ")",
    # The index holds only rows that `get` may return.
    "CREATE INDEX outcomes_by_key ON outcomes (key, id) WHERE outcome = 'scored' AND cached = 0",
    "CREATE INDEX outcomes_by_step ON outcomes (step)",
    # `rowid` is the order of writing, in which the oldest are deleted.
    "CREATE TABLE texts (hash TEXT PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE trained (run_id TEXT NOT NULL, recorded_at REAL NOT NULL, sample_id TEXT NOT NULL, group_id TEXT, "
    "step INTEGER, reward REAL, advantage REAL, masked INTEGER NOT NULL)",
    "CREATE INDEX trained_by_sample ON trained (run_id, sample_id)",
    "CREATE TABLE live (run_id TEXT NOT NULL, engine INTEGER NOT NULL, source TEXT NOT NULL, "
    "recorded_at REAL NOT NULL, state TEXT NOT NULL, PRIMARY KEY (run_id, engine, source))",
    "CREATE TABLE holds (run_id TEXT NOT NULL, source TEXT NOT NULL, PRIMARY KEY (run_id, source))",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)


def open_database(path: str) -> sqlite3.Connection:
    """Open the journal at `path`, or create it.

    Any thread may use the connection, one at a time. Blocks for up to `BUSY_TIMEOUT_S` while other processes create the
    same journal. Raises `JournalError`.
    """
    give_up_at = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        with ExitStack() as opened:
            try:
                connection = sqlite3.connect(
                    path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
                )
                opened.callback(connection.close)
                _prepare(connection, path)
                opened.pop_all()
                return connection
            except (sqlite3.Error, OSError, ValueError) as error:
                if "locked" not in str(error) or time.monotonic() > give_up_at:
                    raise JournalError(explained(error, path)) from None
        # SQLite waits for all locks but the one of the switch to WAL mode.
        threading.Event().wait(0.01)


@contextmanager
def reading(path: str) -> Iterator[sqlite3.Connection]:
    """Open the journal at `path`, which must exist, for queries only; also while a run writes to it.

    It is not changed. SQLite's `mode=ro` is not used, because it leaves WAL files behind. Raises
    `JournalError`, also for a query in the block that fails.
    """
    uri = f"file:{quote(str(Path(path).absolute()))}?mode=rw"
    try:
        # Any thread may use it, one at a time.
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False)) as connection:
            connection.execute("PRAGMA query_only = ON")
            if not _is_ours(connection, path):
                raise JournalError(
                    f"{path} is no journal of qreward, or is empty; of a run that goes on, copy {path}-wal too"
                )
            yield connection
    except sqlite3.Error as error:
        raise JournalError(explained(error, path)) from None


def rows_of(paths: Sequence[str], query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the rows that a query finds in journals, each after the number of its journal. Raises `JournalError`."""
    for number, path in enumerate(paths):
        with reading(path) as connection:
            for row in connection.execute(query, values):
                yield (number, *row)


def check_place(path: str) -> None:
    """Check that a journal could be opened at `path`, without creating or changing it. Raises `JournalError`."""
    folder = os.path.dirname(path) or "."
    exists = os.path.exists(path) and os.path.getsize(path) > 0
    if exists:
        with reading(path):
            pass
    elif not os.path.isdir(folder):
        raise JournalError(f"the journal {path} cannot be opened: there is no directory {folder!r}; create it")
    if not os.access(path if exists else folder, os.W_OK):
        raise JournalError(explained(sqlite3.OperationalError("readonly"), path))


def is_journal(path: str) -> bool:
    """Return whether a file is a journal of this version, by its header (sqlite.org/fileformat). Raises nothing."""
    with suppress(OSError), open(path, "rb") as file:
        header = file.read(_HEADER_BYTES)
        version, application = (int.from_bytes(header[at : at + 4], "big") for at in (60, 68))
        return header.startswith(_MAGIC) and (application, version) == (_APPLICATION_ID, SCHEMA_VERSION)
    return False


def _prepare(connection: sqlite3.Connection, path: str) -> None:
    # The check comes before any change, because the file may belong to another program.
    connection.execute("BEGIN")
    _is_ours(connection, path)
    connection.execute("COMMIT")
    # It is one transaction, because another process may be creating the journal now. In WAL mode, the header of a new
    # file would stay beside the file for a while, and `is_journal` would not find it.
    connection.execute("BEGIN IMMEDIATE")
    if not _is_ours(connection, path):
        for statement in _CREATE:
            connection.execute(statement)
    # Reads the last pages of the table, because damage there would make every write fail.
    connection.execute("SELECT max(id) FROM outcomes").fetchall()
    connection.execute("COMMIT")
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise JournalError(
            f"the file system of the journal {path} does not support WAL mode (SQLite offers {mode}); use a local disk"
        )
    connection.execute("PRAGMA synchronous = NORMAL")


def _is_ours(connection: sqlite3.Connection, path: str) -> bool:
    """Whether the file is a journal of this schema version; False for a new file. Raises `JournalError` for others."""
    application, version, tables = (
        connection.execute(query).fetchone()[0]
        for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    )
    if not (application or version or tables):
        return False
    if application != _APPLICATION_ID:
        raise JournalError(f"{path} is no journal of qreward but a database of another program; name another file")
    if version != SCHEMA_VERSION:
        raise JournalError(
            f"the journal {path} has schema version {version}, and this version of qreward-plugins uses version "
            f"{SCHEMA_VERSION}; move the file away, or choose another path for engine.journal; to read it, use the "
            "version that wrote it"
        )
    return True


def explained(error: Exception, path: str) -> str:
    """Explain an error of SQLite or the system for the journal at `path`, with the remedy."""
    message, beside = str(error), f"{path}.journal"
    instead = f"that of `qreward score` is {beside}" if os.path.exists(beside) else "name another file"
    if os.path.isdir(path):
        return f"the journal {path} is a directory; name a file in it"
    for part, meaning in (
        ("not a database", f"{path} is not a journal; {instead}"),
        ("malformed", f"the journal {path} is damaged; move it away and start a new one"),
        ("no such table", f"the journal {path} is damaged; move it away and start a new one"),
        ("readonly", f"the journal {path} cannot be written; check the permissions of the file and its directory"),
        ("unable to open", f"the journal {path} cannot be opened; check that its directory exists and may be written"),
        ("is full", f"the disk of the journal {path} is full; free some space"),
        ("disk I/O", f"the disk of the journal {path} fails or is full; free some space, or use another disk"),
        ("locked", f"another process has locked the journal {path} for more than {BUSY_TIMEOUT_S:g} s; stop it"),
    ):
        if part in message:
            return f"{meaning} ({message})"
    return f"the journal {path} failed ({type(error).__name__}: {message})"
