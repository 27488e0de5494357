"""`Writer` writes the rows of a journal in a thread of its own.

Rows are written in batches, because a transaction costs more than its rows. Rows that cannot be written are kept in
memory, up to a bound, and retried until the journal is closed.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, TypeAlias

from ..errors import JournalError
from ..samples import Verdict
from . import entries
from .database import explained

_log = logging.getLogger("qreward_plugins.journal")

COMMIT_AFTER_S: Final = 0.05
"""Seconds after which an entry is written at the latest, unless the disk is slower."""

COMMIT_ENTRIES: Final = 256
"""Number of waiting entries that are written without further delay."""

COMMIT_MOST: Final = 1024
"""Largest number of entries in one transaction. Other processes wait for it, so it is bounded."""

KEPT_BYTES: Final = 64 * 2**20
"""Most bytes of texts in memory that are not written yet. Further texts are lost: they cost the journal no number."""

KEPT_ROWS: Final = 50_000
"""Most outcomes that are kept in memory while the file cannot be written. Further ones are lost."""

FIRST_RETRY_S: Final = 0.25
LONGEST_RETRY_S: Final = 10.0
"""Seconds between two write attempts: doubled after each failure, from the first to the longest."""

CLOSE_WITHIN_S: Final = 15.0
"""Longest time in seconds that closing goes on retrying writes."""

LOOK_EVERY_S: Final = 1.0
"""Seconds between two looks at what other processes want of this one."""

_Row: TypeAlias = tuple[entries.Value, ...]
"""The values of `COLUMNS`; the first is the key."""

_INSERT: Final = (
    f"INSERT INTO outcomes ({', '.join(entries.COLUMNS)}) VALUES ({', '.join('?' for _ in entries.COLUMNS)})"
)


class Writer:
    """Writes rows over `connection`, which it closes at the end. Starts its thread at once.

    `on_last` is called in the thread when all rows are written, before the connection is closed.

    Any thread may call its methods. They raise `JournalError` once the journal is being closed, and in a forked child.
    """

    def __init__(
        self, path: str, connection: sqlite3.Connection, *, most_bytes: float, on_last: Callable[[], None]
    ) -> None:
        self.write_errors = 0
        """Number of lost rows."""
        self.process_id = os.getpid()
        self._path = path
        self._connection = connection
        self._most_bytes = most_bytes
        self._on_last = on_last
        self._changed = threading.Condition()
        self._rows: list[_Row] = []
        """Rows that are not written yet, in their order."""
        self._verdicts: dict[entries.Value, tuple[_Row, Verdict]] = {}
        """The verdicts of these rows, by their keys."""
        self._texts: dict[str, bytes] = {}
        """Texts that are written next, with the rows."""
        self._text_bytes = 0
        self._is_full = False
        """Whether the last write failed because the disk is full."""
        self._failing: str | None = None
        """Why the last write failed; None if it did not."""
        self._retry_s = FIRST_RETRY_S
        self._calls: list[Future[None]] = []
        self._closing = False
        self._closed: Future[None] = _started()
        self._failure: str | None = None
        self._logged: set[str] = set()
        self.every_second: Callable[[sqlite3.Connection], None] | None = None
        """Called in the thread about once a second, with the connection; it may raise anything."""
        self._looked_at = -math.inf
        self._thread = threading.Thread(target=self._write, name="qreward-journal-writer", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)

    def verdict(self, keys: Iterable[str]) -> Verdict | None:
        """Return the verdict of a row that is not written yet."""
        return next((found[1] for found in map(self._verdicts.get, keys) if found is not None), None)

    def add(self, row: _Row, verdict: Verdict | None, texts: Mapping[str, bytes]) -> None:
        """Accept a row and its texts, by their hashes. Until it is written, `verdict` is found under its key. The row
        is lost if memory is full, and the texts before it.
        """
        if len(self._rows) >= KEPT_ROWS and self._failing is not None:
            self.lost(1, self._failing)
            self._say_once(
                "room", f"{self._failing}; the memory for unwritten outcomes is full, further outcomes are lost"
            )
            return
        with self._changed:
            self.check()
            self._rows.append(row)
            if verdict is not None:
                self._verdicts[row[0]] = (row, verdict)
            if self._text_bytes <= KEPT_BYTES:
                self._texts.update(texts)
                self._text_bytes += sum(map(len, texts.values()))
            if len(self._rows) in (1, COMMIT_ENTRIES):
                self._changed.notify()

    def room(self, most: int) -> Future[None] | None:
        """Return a future that is done when the rows that wait now are written; None if at most `most` are unwritten,
        or if they cannot be written.
        """
        with self._changed:
            return self._call() if len(self._rows) > most and self._failing is None else None

    def is_behind(self, most: int) -> bool:
        """Whether more than `most` rows are unwritten, or rows cannot be written."""
        with self._changed:
            return len(self._rows) > most or self._failing is not None

    def written(self) -> Future[None]:
        """Return a future that is done when the rows that wait now are written, or could not be."""
        with self._changed:
            self.check()
            return self._call()

    def raise_unwritten(self) -> None:
        """Raise `JournalError` if rows were lost since this was last raised, or cannot be written now."""
        self.raise_failure()
        with self._changed:
            kept, why = len(self._rows), self._failing
        if why is not None:
            raise JournalError(f"{kept:,} outcomes are not recorded yet: {why}; they are kept in memory and retried")

    def raise_failure(self) -> None:
        """Raise `JournalError` if rows were lost since this was last raised."""
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise JournalError(failure)

    def closed(self) -> Future[None]:
        """Begin to close, and return a future that is done when the last row is written or lost."""
        self._begin_closing()
        return self._closed

    def join(self) -> None:
        """Wait for the thread, once `closed` is done. Raises as `raise_failure` does."""
        self._thread.join()
        atexit.unregister(self._close_at_exit)
        self.raise_failure()

    def _begin_closing(self) -> None:
        if os.getpid() != self.process_id:
            raise JournalError(f"the journal {self._path} was opened by another process; close it there")
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _close_at_exit(self) -> None:
        if os.getpid() == self.process_id:
            self._begin_closing()
            self._thread.join()

    def check(self) -> None:
        """Raise `JournalError` if the journal is closed, or was opened before a fork."""
        if self._closing:
            raise JournalError(f"the journal {self._path} is closed")
        if os.getpid() != self.process_id:
            raise JournalError(f"the journal {self._path} was opened before a fork; open another one in this process")

    def _call(self) -> Future[None]:
        """Return a future that is done when all entries that wait now are written. The lock must be held."""
        call = _started()
        self._calls.append(call)
        self._changed.notify()
        return call

    def _write(self) -> None:
        """Write entries until the journal is closed. Runs in the writing thread."""
        while not self._write_once():
            pass
        try:
            self._on_last()
            self._connection.close()
        except sqlite3.Error as error:
            self.lost(0, explained(error, self._path))
        finally:
            self._closed.set_result(None)

    def _write_once(self) -> bool:
        """Wait for rows and write them; return whether they were the last."""
        with self._changed:
            if self._failing is not None:
                # Wait before the next try, unless `flush` or `aclose` asks for one now.
                self._changed.wait_for(lambda: self._calls or self._closing, self._retry_s)
            else:
                self._changed.wait_for(lambda: self._rows or self._calls or self._closing, LOOK_EVERY_S)
                self._changed.wait_for(
                    lambda: len(self._rows) >= COMMIT_ENTRIES or self._calls or self._closing, COMMIT_AFTER_S
                )
            calls, self._calls = self._calls, []
            last = self._closing
        self._commit_all()
        if self.every_second is not None and time.monotonic() >= self._looked_at + LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            with suppress(Exception):  # what looks at a run must not cost its record
                self.every_second(self._connection)
        if last:
            self._commit_before_closing()
        for call in calls:
            call.set_result(None)
        return last

    def _commit_all(self) -> None:
        """Try to write the rows that are there. Those that cannot be written now stay."""
        why, left = None, len(self._rows)
        while left and why is None:
            with self._changed:
                rows, texts = self._rows[: min(left, COMMIT_MOST)], dict(self._texts)
            why, is_full = self._commit(rows, texts), self._is_full
            if is_full and texts:
                # Numbers take little room.
                why = self._commit(rows, {})
            with self._changed:
                if why is None or is_full:
                    for name in texts:
                        del self._texts[name]
                    self._text_bytes = sum(map(len, self._texts.values()))
                if why is None:
                    left -= len(rows)
                    self._let_go(rows)
        with self._changed:
            recovered, self._failing = self._failing and why is None, why
            self._retry_s = FIRST_RETRY_S if why is None else min(2 * self._retry_s, LONGEST_RETRY_S)
            kept = len(self._rows)
        if why is not None:
            self._say_once("write", f"{why}; {kept:,} outcomes are kept in memory and retried, and scoring goes on")
        elif recovered:
            self._logged.discard("write")
            _log.warning("the journal %s can be written again; all kept outcomes are recorded", self._path)

    def _commit_before_closing(self) -> None:
        """Retry for up to `CLOSE_WITHIN_S`, then count the remaining rows as lost."""
        give_up_at = time.monotonic() + CLOSE_WITHIN_S
        while self._rows and time.monotonic() < give_up_at:
            threading.Event().wait(min(self._retry_s, CLOSE_WITHIN_S / 10))
            self._commit_all()
        if self._rows:
            self.lost(len(self._rows), self._failing or "the journal was closed")
            self._let_go(list(self._rows))
            _log.error("%s", self._failure)

    def _let_go(self, rows: list[_Row]) -> None:
        """Forget the first rows. Nobody else may change them meanwhile."""
        del self._rows[: len(rows)]
        for row in rows:
            if self._verdicts.get(row[0], (None,))[0] is row:
                del self._verdicts[row[0]]

    def _commit(self, rows: list[_Row], texts: Mapping[str, bytes]) -> str | None:
        """Write all `rows` and `texts` or none; return why they cannot be written now."""
        self._is_full = False
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(_INSERT, rows)
            if texts:
                self._write_texts(texts)
            self._connection.execute("COMMIT")
        except Exception as error:
            with suppress(sqlite3.Error):  # the next BEGIN fails, too, and is handled there
                self._connection.rollback()
            self._is_full = any(words in str(error) for words in ("is full", "disk I/O"))
            return explained(error, self._path)
        return None

    def _write_texts(self, texts: Mapping[str, bytes]) -> None:
        execute = self._connection.execute
        for name, body in texts.items():
            # The siblings of a group share their prompt.
            if not execute("SELECT 1 FROM texts WHERE hash = ?", (name,)).fetchone():
                execute("INSERT INTO texts VALUES (?, ?)", (name, _compressed(body)))
        (pages,), (free,), (size,) = (
            execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
        )
        if (pages - free) * size > self._most_bytes:
            execute("DELETE FROM texts WHERE rowid <= (SELECT min(rowid) + (max(rowid) - min(rowid)) / 8 FROM texts)")

    def lost(self, count: int, why: str) -> None:
        """Count entries that will never be written."""
        with self._changed:
            self.write_errors += count
            self._failure = (
                f"{self.write_errors:,} outcomes were not recorded: {why}; a later run asks and pays for their "
                "verdicts again"
            )

    def _say_once(self, what: str, message: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            _log.error("%s", message)


def _compressed(body: bytes) -> bytes:
    # A small window and little memory: to clear those of the default takes 50 us, four times as long as the rest.
    compress = zlib.compressobj(1, zlib.DEFLATED, 13, 6)
    return compress.compress(body) + compress.flush()


def _started() -> Future[None]:
    """Return a future that cannot be cancelled, so that a cancelled caller does not withdraw its call."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
