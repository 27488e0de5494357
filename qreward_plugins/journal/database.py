"""Opens the journal's SQLite file, and says what is wrong with it in one sentence.

The file is in WAL mode: readers never wait for a writer, a killed process leaves at worst a tail that SQLite ignores,
and with `synchronous=NORMAL` a commit costs no disk flush (a power failure may cost the last commits, not the file).
The application id keeps the journal from writing its table into somebody else's database.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from typing import Final

from ..errors import JournalError
from .entries import ADDED_IN_2, COLUMNS

_log = logging.getLogger("qreward_plugins.journal")

SCHEMA_VERSION: Final = 2

BUSY_TIMEOUT_S: Final = 5.0
"""How long a process waits for another one that is writing, in seconds."""

_APPLICATION_ID: Final = 0x71526A31

_CREATE: Final = (
    "CREATE TABLE outcomes (id INTEGER PRIMARY KEY, " + ", ".join(f"{name} {kind}" for name, kind in COLUMNS) + ")",
    # Only what `get` may answer with is in the index.
    "CREATE INDEX outcomes_by_key ON outcomes (key, id) WHERE outcome = 'scored' AND cached = 0",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)


def open_database(path: str) -> sqlite3.Connection:
    """Open or make the journal at `path`, ready to be written.

    Any one thread at a time may use the connection. Blocks for up to `BUSY_TIMEOUT_S` while other processes are making
    the same journal. Raises `JournalError`.
    """
    give_up_at = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return _opened(path)
        except _Locked as error:
            problem = str(error)
        if time.monotonic() > give_up_at:
            raise JournalError(problem)
        # SQLite waits for locks by itself, but not for the one that turns on the WAL.
        threading.Event().wait(0.01)


class _Locked(JournalError):
    pass


def _opened(path: str) -> sqlite3.Connection:
    connection = None
    problem: JournalError
    try:
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        _prepare(connection, path)
    except (sqlite3.Error, OSError, ValueError) as error:
        problem = (_Locked if "locked" in str(error) else JournalError)(explained(error, path))
    except JournalError as error:
        problem = error
    else:
        return connection
    if connection is not None:
        connection.close()
    raise problem from None


def _prepare(connection: sqlite3.Connection, path: str) -> None:
    # Looked at before anything is changed: the file may belong to another program. One transaction, because another
    # process may be making the journal at this moment.
    connection.execute("BEGIN")
    application, version, tables = _identity(connection)
    connection.execute("COMMIT")
    if application != _APPLICATION_ID and (application or version or tables):
        raise JournalError(f"{path} is the database of another program; choose another path for engine.journal")
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise JournalError(f"the journal {path} cannot be shared there (SQLite offers {mode}); put it on a local disk")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("BEGIN IMMEDIATE")
    application, version, _ = _identity(connection)
    if not application:
        for statement in _CREATE:
            connection.execute(statement)
    elif version == 1:
        _bring_up_to_2(connection, path)
    elif version != SCHEMA_VERSION:
        raise JournalError(
            f"the journal {path} has schema version {version}, this package knows version {SCHEMA_VERSION}; "
            "upgrade qreward-plugins, or choose another path"
        )
    # Touches the pages at the end of the table, where damage would stop the writing.
    connection.execute("SELECT max(id) FROM outcomes").fetchall()
    connection.execute("COMMIT")


def _bring_up_to_2(connection: sqlite3.Connection, path: str) -> None:
    """Add what version 1 lacks. A process with an older package may go on writing: it names the columns it knows."""
    kinds = dict(COLUMNS)
    for name in ADDED_IN_2:
        connection.execute(f"ALTER TABLE outcomes ADD COLUMN {name} {kinds[name]}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    _log.warning(
        "the journal %s was brought from schema version 1 to %d: its verdicts stay on record, but none is used again, "
        "because version 1 did not tell apart everything that is sent to a judge; new ones are recorded as they come",
        path,
        SCHEMA_VERSION,
    )


def _identity(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Application id, schema version and number of tables; all 0 for a new file."""
    return (
        connection.execute("PRAGMA application_id").fetchone()[0],
        connection.execute("PRAGMA user_version").fetchone()[0],
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0],
    )


def explained(error: Exception, path: str) -> str:
    """What a foreign error means for the journal at `path`, and what to do about it."""
    said = str(error)
    for part, meaning in (
        ("not a database", f"{path} is not a journal; choose another path, or remove the file"),
        ("malformed", f"the journal {path} is damaged; move it away and start a new one"),
        ("no such table", f"the journal {path} is damaged; move it away and start a new one"),
        ("readonly", f"the journal {path} cannot be written; check the permissions of the file and its directory"),
        ("unable to open", f"the journal {path} cannot be opened; check that its directory exists and may be written"),
        ("is full", f"the disk is full below the journal {path}; make room"),
        ("disk I/O", f"the disk fails or is full below the journal {path}; make room, or choose a local disk"),
        ("locked", f"another process holds the journal {path} for more than {BUSY_TIMEOUT_S:g} s; stop that process"),
    ):
        if part in said:
            return f"{meaning} ({said})"
    return f"the journal {path} failed ({type(error).__name__}: {said})"
