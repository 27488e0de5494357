"""`Journal`: verdicts go in from any event loop and come back out of a SQLite file, now or in a later run.

One thread writes and one reads, each over a connection of its own. What is handed in is the journal's from that moment
on: no cancelled caller and no closed event loop takes it back. Rows are written many at a time, because a transaction
costs more than the rows in it.

A journal that cannot be written must not stop a training run, and a lock or a disk that is full for a while must not
lose answers that were paid for. So entries that cannot be written are kept in memory, up to a bound, and tried again
until the journal is closed. The error is logged, and raised by `flush` and `aclose`.
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
"""An entry is written at the latest this many seconds after it was handed in, unless the disk is slower."""

COMMIT_ENTRIES: Final = 256
"""This many waiting entries are written at once."""

COMMIT_MOST: Final = 1024
"""Most entries of one transaction, which other processes wait for."""

ROOM: Final = 4096
"""When more entries than this wait to be written, `put` waits too, as long as the file can be written."""

KEPT_CHARS: Final = 64 * 2**20
"""Most characters kept in memory while the file cannot be written; outcomes beyond that are not recorded."""

FIRST_RETRY_S: Final = 0.25
LONGEST_RETRY_S: Final = 10.0
"""Seconds between two tries to write, doubled from try to try, from the first to the longest."""

CLOSE_WITHIN_S: Final = 15.0
"""How long a journal that is closed goes on trying, in seconds."""

READ_AGAIN_AFTER_S: Final = 5.0
"""Seconds without look-ups after the file could not be read."""

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
    """The record of all outcomes in one SQLite file, which several processes of one machine may share.

    Args:
        path: the file, on a local disk. It is made when it does not exist; its directory is not.
        clock: seconds since 1970 for the column `recorded_at`. This is the one place of the package where the wall
            clock is right: the record is for people and outlives the process.

    Opening blocks for some milliseconds. Raises `JournalError` when the file cannot be opened or written, or is not a
    journal of this version.

    Memory does not grow with the number of entries. While the file cannot be written (locked, disk full) up to about
    `KEPT_CHARS` are kept and tried again, also for `CLOSE_WITHIN_S` seconds when it is closed. A process that is killed
    loses what it handed in during the last 50 ms, and what is kept; one that ends without `aclose` writes that down on
    its way out. A forked child must open its own journal.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = os.fspath(path)
        self.write_errors = 0
        """Entries that are lost: they could not be written before there were too many, or before it was closed."""
        self.read_errors = 0
        """Look-ups that failed, and were answered with None."""
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
        self._said: set[str] = set()
        self._writer = threading.Thread(target=self._write, name="qreward-journal-writer", daemon=True)
        self._writer.start()
        atexit.register(self._close_at_exit)

    async def get(self, *keys: str) -> Verdict | None:
        """The latest verdict that was recorded under one of `keys`, by any process; None: there is none.

        The verdict is `cached`; its attempts, usage, latency and cost are 0, because this time nothing was spent. When
        the file cannot be read, the answer is None: the sample is judged anew. Raises `JournalError` when closed.
        """
        self._check()
        for unwritten in (self._unwritten_verdicts, self._verdicts_being_written):
            for key in keys:
                if key in unwritten:
                    return unwritten[key]
        if time.monotonic() < self._unreadable_until:
            # Otherwise each look-up of a batch would wait for the same lock, one after the other.
            self.read_errors += 1
            return None
        try:
            reading = self._reader.submit(self._read, keys)
        except RuntimeError:
            raise JournalError(f"the journal {self.path} is closed") from None
        return await asyncio.wrap_future(reading)

    async def put(self, key: str | None, sample: Sample, outcome: Outcome) -> None:
        """Record an outcome; without a key it is recorded, but never found by `get`.

        The entry is handed in before this waits for anything, so cancelling the call does not lose it. It waits only
        while more entries are waiting than the file takes, and not where the file takes none. Raises `JournalError`
        when closed, and nothing else.
        """
        self.note(key, sample, outcome)
        with self._changed:
            room = self._call() if self._unwritten > ROOM and self._failing is None else None
        if room is not None:
            await asyncio.wrap_future(room)

    def note(self, key: str | None, sample: Sample, outcome: Outcome) -> None:
        """As `put`, without waiting: for what comes so seldom that it cannot fill the memory. Any thread may call it.

        Raises `JournalError` when closed.
        """
        self._check()
        try:
            row = entries.row(key, sample, outcome, recorded_at=self._clock(), process_id=self._process_id)
        except Exception as error:
            # A sample is made by others; a step that is no number must cost its row, and not its reward.
            self._lost(1, f"an outcome cannot be written ({type(error).__name__})")
            return
        if self._unwritten_chars > KEPT_CHARS and self._failing is not None:
            self._lost(1, self._failing)
            self._say_once(
                "room", f"{self._failing}; no more outcomes can be kept in memory, and further ones are lost"
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
        """Return when everything handed in before is in the file.

        Raises `JournalError` when it cannot be written now (it is kept, and tried again), or when entries were lost
        since the last time that was raised.
        """
        with self._changed:
            self._check()
            written = self._call()
        await asyncio.wrap_future(written)
        self._raise_failure()
        with self._changed:
            kept, why = self._unwritten, self._failing
        if why is not None:
            raise JournalError(
                f"{kept:,} outcomes are not recorded yet: {why}; they are kept in memory and tried again"
            )

    async def aclose(self) -> None:
        """Write what is waiting, and end both threads. Idempotent; a cancelled call goes on closing in the background.

        Where the file cannot be written it goes on trying for `CLOSE_WITHIN_S` seconds. Raises `JournalError` once when
        entries are lost; everything is closed then, too.
        """
        self._begin_closing()
        await asyncio.wrap_future(self._closed)
        self._finish()

    def close(self) -> None:
        """As `aclose`, for code without an event loop: blocks the calling thread."""
        self._begin_closing()
        self._closed.result()
        self._finish()

    def _finish(self) -> None:
        self._writer.join()
        atexit.unregister(self._close_at_exit)
        self._raise_failure()

    def _begin_closing(self) -> None:
        if os.getpid() != self._process_id:
            raise JournalError(f"the journal {self.path} was opened by another process; leave it to that one")
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
        """A future that is done when everything that waits now is written. The lock must be held."""
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
            # All rows are fetched, if there is one: a statement that is not finished would keep the WAL from shrinking.
            select = _SELECT.format(marks=", ".join("?" * len(keys)))
            rows = self._reading.execute(select, keys).fetchall()
            return entries.verdict(rows[0]) if rows else None
        except Exception as error:
            self.read_errors += 1
            if isinstance(error, sqlite3.OperationalError):
                self._unreadable_until = time.monotonic() + READ_AGAIN_AFTER_S
            self._say_once("read", f"{explained(error, self.path)}; samples are judged anew")
            return None

    def _write(self) -> None:
        """The writing thread."""
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
        """Wait for entries and write them; true when they were the last."""
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
        """Move the waiting entries to those to be written. The lock must be held."""
        self._kept += self._waiting
        self._waiting = []
        # Filled before the other is emptied, because `get` reads both without the lock, in the opposite order.
        self._verdicts_being_written = {**self._verdicts_being_written, **self._unwritten_verdicts}
        self._unwritten_verdicts = {}

    def _commit_kept(self) -> None:
        """Try to write the kept entries; those that cannot be written now stay."""
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
            self._say_once("write", f"{why}; {kept:,} outcomes are kept in memory until it can, and scoring goes on")
        elif recovered:
            self._said.discard("write")
            _log.warning("the journal %s can be written again; everything that was kept is in it", self.path)

    def _commit_before_closing(self) -> None:
        """Go on trying for `CLOSE_WITHIN_S`, because entries that are not in the file then are lost."""
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
        """Write `rows`, all or none; return why they cannot be written now. A row that never can is dropped."""
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
        """Count entries that will never be in the file."""
        with self._changed:
            self.write_errors += count
            self._failure = (
                f"{self.write_errors:,} outcomes were not recorded: {why}; their verdicts will be asked for, and paid "
                "for, again"
            )

    def _roll_back(self) -> None:
        try:
            if self._writing.in_transaction:
                self._writing.execute("ROLLBACK")
        except sqlite3.Error:
            # The next BEGIN fails and is counted.
            return

    def _say_once(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.error("%s", message)


def _started() -> Future[None]:
    """A future that nobody can cancel: an event loop that gives up waiting must not take the call back."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def _chars(row: tuple[entries.Value, ...]) -> int:
    """About what a row takes in memory, in characters."""
    return _ROW_CHARS + sum(len(value) for value in row if isinstance(value, str))
