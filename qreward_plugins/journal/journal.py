"""`Journal` records outcomes in a SQLite file and returns recorded verdicts, in the same run or a later one.

One thread writes and one reads, each over a connection of its own. An entry that was passed to `put` is written even if
the caller is cancelled or its event loop is closed. Rows are written in batches, because a transaction costs more than
its rows.

A journal that cannot be written must not stop a training run, and a temporary lock or full disk must not lose answers
that were paid for. So entries that cannot be written are kept in memory, up to a bound, and retried until the journal
is closed. The error is logged, and raised by `flush` and `aclose`.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from ..errors import JournalError
from ..samples import Outcome, Sample, Scored, Verdict
from . import entries
from .database import explained, open_database

_log = logging.getLogger("qreward_plugins.journal")

COMMIT_AFTER_S: Final = 0.05
"""Seconds after which an entry is written at the latest, unless the disk is slower."""

COMMIT_ENTRIES: Final = 256
"""Number of waiting entries that are written without further delay."""

COMMIT_MOST: Final = 1024
"""Largest number of entries in one transaction. Other processes wait for it, so it is bounded."""

ROOM: Final = 4096
"""Number of unwritten entries above which `put` waits, while the file can be written."""

KEPT_CHARS: Final = 64 * 2**20
"""Largest number of characters kept in memory while the file cannot be written. Further outcomes are lost."""

FIRST_RETRY_S: Final = 0.25
LONGEST_RETRY_S: Final = 10.0
"""Seconds between two write attempts: doubled after each failure, from the first to the longest."""

CLOSE_WITHIN_S: Final = 15.0
"""Longest time in seconds that closing goes on retrying writes."""

READ_AGAIN_AFTER_S: Final = 5.0
"""Seconds without look-ups after a failed read."""

_ROW_CHARS: Final = 500
"""Assumed size of a row without its texts, in characters."""

_FAULTS_OF_A_ROW: Final = (
    sqlite3.ProgrammingError,
    sqlite3.InterfaceError,
    sqlite3.IntegrityError,
    sqlite3.DataError,
    OverflowError,
    UnicodeError,
)

_INSERT: Final = (
    f"INSERT INTO outcomes ({', '.join(name for name, _ in entries.COLUMNS)}) "
    f"VALUES ({', '.join('?' for _ in entries.COLUMNS)})"
)
_SELECT: Final = (
    f"SELECT {', '.join(entries.VERDICT_COLUMNS)} FROM outcomes "
    "WHERE key IN ({marks}) AND outcome = 'scored' AND cached = 0 ORDER BY id DESC LIMIT 1"
)


class Journal:
    """Records all outcomes in one SQLite file, which several processes of one machine may share.

    Args:
        path: the file, on a local disk. It is created if it does not exist; its directory must exist.
        clock: returns seconds since 1970 for the column `recorded_at`. Wall-clock time is used here because the record
            outlives the process.

    Opening blocks for some milliseconds. Raises `JournalError` if the file cannot be opened or written, or is not a
    journal of this version.

    Memory does not grow with the number of entries. While the file cannot be written (locked, disk full), about
    `KEPT_CHARS` characters of entries are kept and retried; `aclose` retries for up to `CLOSE_WITHIN_S` seconds. A
    killed process loses the entries of the last 50 ms and the kept ones. A process that exits without `aclose` writes
    them at exit. A forked child must open its own journal.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = os.fspath(path)
        self.write_errors = 0
        """Number of lost entries: they could not be written, and memory was full or the journal was closed."""
        self.read_errors = 0
        """Number of failed look-ups, which returned None."""
        self._clock = clock
        self._process_id = os.getpid()
        self._reading = open_database(self.path)
        try:
            self._writing = open_database(self.path)
        except JournalError:
            self._reading.close()
            raise
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="qreward-journal-reader")
        self._changed = threading.Condition()
        self._waiting: list[tuple[entries.Value, ...]] = []
        self._unwritten_verdicts: dict[str, Verdict] = {}
        self._verdicts_being_written: dict[str, Verdict] = {}
        self._kept: list[tuple[entries.Value, ...]] = []
        self._unwritten = 0
        self._unwritten_chars = 0
        self._failing: str | None = None
        self._retry_s = FIRST_RETRY_S
        self._calls: list[Future[None]] = []
        self._unreadable_until = -math.inf
        self._closing = False
        self._closed: Future[None] = _started()
        self._failure: str | None = None
        self._logged: set[str] = set()
        self._writer = threading.Thread(target=self._write, name="qreward-journal-writer", daemon=True)
        self._writer.start()
        atexit.register(self._close_at_exit)

    async def get(self, *keys: str) -> Verdict | None:
        """Return the latest verdict that any process recorded under one of `keys`; None if there is none.

        The verdict is `cached`; its attempts, usage, latency and cost are 0, because a look-up costs nothing. If the
        file cannot be read, returns None, so that the sample is judged again. Raises `JournalError` if closed.
        """
        self._check()
        for unwritten in (self._unwritten_verdicts, self._verdicts_being_written):
            for key in keys:
                if key in unwritten:
                    return unwritten[key]
        if time.monotonic() < self._unreadable_until:
            # Otherwise every look-up of a batch would wait for the same lock, one after another.
            self.read_errors += 1
            return None
        try:
            reading = self._reader.submit(self._read, keys)
        except RuntimeError:
            raise JournalError(f"the journal {self.path} is closed") from None
        return await asyncio.wrap_future(reading)

    async def put(self, key: str | None, sample: Sample, outcome: Outcome) -> None:
        """Record an outcome. Without a key it is recorded, but `get` never returns it.

        The entry is accepted before the call first waits, so a cancellation does not lose it. The call waits only while
        more than `ROOM` entries are unwritten and the file can be written. Raises only `JournalError`, if closed.
        """
        self.note(key, sample, outcome)
        with self._changed:
            room = self._call() if self._unwritten > ROOM and self._failing is None else None
        if room is not None:
            await asyncio.wrap_future(room)

    def note(self, key: str | None, sample: Sample, outcome: Outcome) -> None:
        """Record an outcome as `put` does, without waiting. For rare entries, because it does not limit the memory.

        Any thread may call it. Raises `JournalError` if closed.
        """
        self._check()
        try:
            row = entries.row(key, sample, outcome, recorded_at=self._clock(), process_id=self._process_id)
        except Exception as error:
            # Samples come from outside: a step that is not a number may lose the row, but not the reward.
            self._lost(1, f"an outcome cannot be written ({type(error).__name__})")
            return
        if self._unwritten_chars > KEPT_CHARS and self._failing is not None:
            self._lost(1, self._failing)
            self._say_once(
                "room", f"{self._failing}; the memory for unwritten outcomes is full, further outcomes are lost"
            )
            return
        with self._changed:
            self._check()
            self._waiting.append(row)
            self._unwritten += 1
            self._unwritten_chars += _chars(row)
            if key is not None and isinstance(outcome, Scored) and entries.is_answer(outcome.verdict):
                self._unwritten_verdicts[key] = entries.as_cached(outcome.verdict)
            if len(self._waiting) in (1, COMMIT_ENTRIES):
                self._changed.notify()

    async def flush(self) -> None:
        """Wait until all earlier entries are in the file.

        Raises `JournalError` if they cannot be written now (they are kept and retried), or if entries were lost since
        this was last raised.
        """
        with self._changed:
            self._check()
            written = self._call()
        await asyncio.wrap_future(written)
        self._raise_failure()
        with self._changed:
            kept, why = self._unwritten, self._failing
        if why is not None:
            raise JournalError(f"{kept:,} outcomes are not recorded yet: {why}; they are kept in memory and retried")

    async def aclose(self) -> None:
        """Write all unwritten entries and end both threads. Idempotent. After a cancellation, closing goes on in the
        background.

        If the file cannot be written, retries for `CLOSE_WITHIN_S` seconds. Raises `JournalError` once if entries are
        lost; everything is closed then, too.
        """
        self._begin_closing()
        await asyncio.wrap_future(self._closed)
        self._finish()

    def close(self) -> None:
        """Close the journal as `aclose` does, blocking the calling thread."""
        self._begin_closing()
        self._closed.result()
        self._finish()

    def _finish(self) -> None:
        self._writer.join()
        atexit.unregister(self._close_at_exit)
        self._raise_failure()

    def _begin_closing(self) -> None:
        if os.getpid() != self._process_id:
            raise JournalError(f"the journal {self.path} was opened by another process; close it there")
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _close_at_exit(self) -> None:
        if os.getpid() == self._process_id:
            self._begin_closing()
            self._writer.join()

    def _check(self) -> None:
        if self._closing:
            raise JournalError(f"the journal {self.path} is closed")
        if os.getpid() != self._process_id:
            raise JournalError(f"the journal {self.path} was opened before a fork; open another one in this process")

    def _call(self) -> Future[None]:
        """Return a future that is done when all entries that wait now are written. The lock must be held."""
        call = _started()
        self._calls.append(call)
        self._changed.notify()
        return call

    def _raise_failure(self) -> None:
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise JournalError(failure)

    def _read(self, keys: tuple[str, ...]) -> Verdict | None:
        try:
            # `fetchall`, because an unfinished statement keeps the WAL from shrinking.
            select = _SELECT.format(marks=", ".join("?" * len(keys)))
            rows = self._reading.execute(select, keys).fetchall()
            return entries.verdict(rows[0]) if rows else None
        except Exception as error:
            self.read_errors += 1
            if isinstance(error, sqlite3.OperationalError):
                self._unreadable_until = time.monotonic() + READ_AGAIN_AFTER_S
            self._say_once("read", f"{explained(error, self.path)}; samples are judged again")
            return None

    def _write(self) -> None:
        """Write entries until the journal is closed. Runs in the writing thread."""
        while not self._write_once():
            pass
        self._reader.shutdown(wait=True)
        try:
            self._reading.close()
            self._writing.close()
        except sqlite3.Error as error:
            self._lost(0, explained(error, self.path))
        finally:
            self._closed.set_result(None)

    def _write_once(self) -> bool:
        """Wait for entries and write them; return whether they were the last."""
        with self._changed:
            if self._kept:
                # The last write failed: wait before the next try, unless `flush` or `aclose` asks for one now.
                self._changed.wait_for(lambda: self._calls or self._closing, self._retry_s)
            else:
                self._changed.wait_for(lambda: self._waiting or self._calls or self._closing)
                self._changed.wait_for(
                    lambda: len(self._waiting) >= COMMIT_ENTRIES or self._calls or self._closing, COMMIT_AFTER_S
                )
            self._take()
            calls, self._calls = self._calls, []
            last = self._closing
        self._commit_kept()
        if last:
            self._commit_before_closing()
        for call in calls:
            call.set_result(None)
        return last

    def _take(self) -> None:
        """Move the waiting entries to the kept ones, which are written next. The lock must be held."""
        self._kept += self._waiting
        self._waiting = []
        # `get` reads both mappings without the lock, in the opposite order, so this one is filled first.
        self._verdicts_being_written = {**self._verdicts_being_written, **self._unwritten_verdicts}
        self._unwritten_verdicts = {}

    def _commit_kept(self) -> None:
        """Try to write the kept entries. Those that cannot be written now stay kept."""
        why = None
        while self._kept and why is None:
            rows = self._kept[:COMMIT_MOST]
            why = self._commit(rows)
            if why is None:
                del self._kept[: len(rows)]
                self._let_go(rows)
        with self._changed:
            recovered, self._failing = self._failing and why is None, why
            if why is None:
                self._verdicts_being_written = {}
                self._retry_s = FIRST_RETRY_S
            else:
                self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            kept = len(self._kept)
        if why is not None:
            self._say_once("write", f"{why}; {kept:,} outcomes are kept in memory and retried, and scoring goes on")
        elif recovered:
            self._logged.discard("write")
            _log.warning("the journal %s can be written again; all kept outcomes are recorded", self.path)

    def _commit_before_closing(self) -> None:
        """Retry for up to `CLOSE_WITHIN_S`, then count the remaining entries as lost."""
        give_up_at = time.monotonic() + CLOSE_WITHIN_S
        while self._kept and time.monotonic() < give_up_at:
            threading.Event().wait(min(self._retry_s, CLOSE_WITHIN_S / 10))
            self._commit_kept()
        if self._kept:
            rows, self._kept = self._kept, []
            self._let_go(rows)
            self._lost(len(rows), self._failing or "the journal was closed")
            _log.error("%s", self._failure)

    def _let_go(self, rows: list[tuple[entries.Value, ...]]) -> None:
        with self._changed:
            self._unwritten -= len(rows)
            self._unwritten_chars -= sum(map(_chars, rows))

    def _commit(self, rows: list[tuple[entries.Value, ...]]) -> str | None:
        """Write all `rows` or none; return why they cannot be written now. Invalid rows are dropped."""
        try:
            self._writing.execute("BEGIN IMMEDIATE")
            try:
                self._writing.executemany(_INSERT, rows)
            except _FAULTS_OF_A_ROW:
                self._roll_back()
                self._writing.execute("BEGIN IMMEDIATE")
                self._insert_one_by_one(rows)
            self._writing.execute("COMMIT")
        except Exception as error:
            self._roll_back()
            return explained(error, self.path)
        return None

    def _insert_one_by_one(self, rows: list[tuple[entries.Value, ...]]) -> None:
        for row in rows:
            try:
                self._writing.execute(_INSERT, row)
            except _FAULTS_OF_A_ROW as error:
                self._lost(1, f"an outcome cannot be written ({type(error).__name__})")

    def _lost(self, count: int, why: str) -> None:
        """Count entries that will never be written."""
        with self._changed:
            self.write_errors += count
            self._failure = (
                f"{self.write_errors:,} outcomes were not recorded: {why}; a later run asks and pays for their "
                "verdicts again"
            )

    def _roll_back(self) -> None:
        try:
            if self._writing.in_transaction:
                self._writing.execute("ROLLBACK")
        except sqlite3.Error:
            # The next BEGIN fails, too, and is handled there.
            return

    def _say_once(self, what: str, message: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            _log.error("%s", message)


def _started() -> Future[None]:
    """Return a future that cannot be cancelled, so that a cancelled caller does not withdraw its call."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def _chars(row: tuple[entries.Value, ...]) -> int:
    """Estimate the size of a row in memory, in characters."""
    return _ROW_CHARS + sum(len(value) for value in row if isinstance(value, str))
