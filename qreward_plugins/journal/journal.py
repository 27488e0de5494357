"""`Journal`: verdicts go in from any event loop and come back out of a SQLite file, now or in a later run.

One thread writes and one reads, each over a connection of its own. What is handed in is the journal's from that moment
on: no cancelled caller and no closed event loop takes it back. Rows are written many at a time, because a transaction
costs more than the rows in it.

A journal that cannot be written any more must not stop a training run: the error is logged once and counted, and raised
where somebody asked for certainty, by `flush` and `aclose`.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
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

ROOM: Final = 4096
"""When more entries than this wait to be written, `put` waits too."""

_INSERT: Final = (
    f"INSERT INTO outcomes ({', '.join(name for name, _ in entries.COLUMNS)}) "
    f"VALUES ({', '.join('?' for _ in entries.COLUMNS)})"
)
_SELECT: Final = (
    f"SELECT {', '.join(entries.VERDICT_COLUMNS)} FROM outcomes "
    "WHERE key = ? AND outcome = 'scored' AND cached = 0 ORDER BY id DESC LIMIT 1"
)


class Journal:
    """The record of all outcomes in one SQLite file, which several processes of one machine may share.

    Args:
        path: the file, on a local disk. It is made when it does not exist; its directory is not.
        clock: seconds since 1970 for the column `recorded_at`. This is the one place of the package where the wall
            clock is right: the record is for people and outlives the process.

    Opening blocks for some milliseconds. Raises `JournalError` when the file cannot be opened or written, or is not a
    journal of this version.

    Memory does not grow with the number of entries. A process that is killed loses what it handed in during the last
    50 ms; one that ends without `aclose` writes that down on its way out. A forked child must open its own journal.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = os.fspath(path)
        self.write_errors = 0
        """Entries that could not be written."""
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
        self._unwritten = 0
        self._calls: list[Future[None]] = []
        self._closing = False
        self._closed: Future[None] = _started()
        self._failure: str | None = None
        self._said: set[str] = set()
        self._writer = threading.Thread(target=self._write, name="qreward-journal-writer", daemon=True)
        self._writer.start()
        atexit.register(self._close_at_exit)

    async def get(self, key: str) -> Verdict | None:
        """The latest verdict that was recorded under `key`, by any process; None: there is none.

        The verdict is `cached`; its attempts, usage, latency and cost are 0, because this time nothing was spent. When
        the file cannot be read, the answer is None: the sample is judged anew. Raises `JournalError` when closed.
        """
        self._check()
        verdict = self._unwritten_verdicts.get(key) or self._verdicts_being_written.get(key)
        if verdict is not None:
            return entries.as_cached(verdict)
        try:
            reading = self._reader.submit(self._read, key)
        except RuntimeError:
            raise JournalError(f"the journal {self.path} is closed") from None
        return await asyncio.wrap_future(reading)

    async def put(self, key: str | None, sample: Sample, outcome: Outcome) -> None:
        """Record an outcome; without a key it is recorded, but never found by `get`.

        The entry is handed in before this waits for anything, so cancelling the call does not lose it. It waits only
        while more entries are waiting than the file takes. Raises `JournalError` when closed, and nothing else.
        """
        self.note(key, sample, outcome)
        with self._changed:
            room = self._call() if self._unwritten > ROOM else None
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
            self._failed(1, f"an outcome cannot be written ({type(error).__name__})")
            return
        with self._changed:
            self._check()
            self._waiting.append(row)
            self._unwritten += 1
            if key is not None and isinstance(outcome, Scored) and not outcome.verdict.cached:
                self._unwritten_verdicts[key] = outcome.verdict
            if len(self._waiting) in (1, COMMIT_ENTRIES):
                self._changed.notify()

    async def flush(self) -> None:
        """Return when everything handed in before is in the file.

        Raises `JournalError` when entries could not be written since the last time it was raised.
        """
        with self._changed:
            self._check()
            written = self._call()
        await asyncio.wrap_future(written)
        self._raise_failure()

    async def aclose(self) -> None:
        """Write what is waiting, and end both threads. Idempotent; a cancelled call goes on closing in the background.

        Raises `JournalError` once when entries could not be written; everything is closed then, too.
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

    def _read(self, key: str) -> Verdict | None:
        try:
            # All rows are fetched, if there is one: a statement that is not finished would keep the WAL from shrinking.
            rows = self._reading.execute(_SELECT, (key,)).fetchall()
            return entries.verdict(rows[0]) if rows else None
        except Exception as error:
            self.read_errors += 1
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
            self._failed(0, explained(error, self.path))
        finally:
            self._closed.set_result(None)

    def _write_once(self) -> bool:
        """Wait for entries and write them; true when they were the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._calls or self._closing)
            self._changed.wait_for(
                lambda: len(self._waiting) >= COMMIT_ENTRIES or self._calls or self._closing, COMMIT_AFTER_S
            )
            rows, self._waiting = self._waiting, []
            calls, self._calls = self._calls, []
            # In this order, because `get` looks at the two in the other one, without the lock.
            self._verdicts_being_written, self._unwritten_verdicts = self._unwritten_verdicts, {}
            last = self._closing
        self._commit(rows)
        with self._changed:
            self._unwritten -= len(rows)
            self._verdicts_being_written = {}
        del rows
        for call in calls:
            call.set_result(None)
        return last

    def _commit(self, rows: list[tuple[entries.Value, ...]]) -> None:
        if not rows:
            return
        try:
            self._writing.execute("BEGIN IMMEDIATE")
            self._writing.executemany(_INSERT, rows)
            self._writing.execute("COMMIT")
        except Exception as error:
            self._failed(len(rows), explained(error, self.path))
            self._roll_back()

    def _failed(self, entries_lost: int, why: str) -> None:
        with self._changed:
            self.write_errors += entries_lost
            self._failure = f"{self.write_errors} outcomes were not recorded: {why}"
        self._say_once("write", f"{self._failure}; scoring goes on without them")

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
