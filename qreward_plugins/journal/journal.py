"""`Journal` records outcomes in a SQLite file and returns recorded verdicts, in the same run or a later one.

One thread writes (`writer.py`) and one reads, each over a connection of its own. An entry that was passed to `put` is
written even if the caller is cancelled or its event loop is closed.

A journal that cannot be written must not stop a training run, and a temporary lock or full disk must not lose answers
that were paid for. So entries that cannot be written are kept in memory, up to a bound, and retried until the journal
is closed. The error is logged, and raised by `flush` and `aclose`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import random
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final
from weakref import WeakMethod

import orjson

from ..errors import JournalError
from ..samples import Outcome, Sample, Scored, Verdict
from ..system.ray_actors import job_name
from . import entries
from .database import explained, open_database
from .entries import Trained
from .history import PastAttempt
from .texts import Interest, Keep, Texts, redaction
from .writer import Writer

VARIABLE: Final = "QREWARD_RUN_ID"
"""The environment variable that names the run, before anything else does."""

_DIGITS: Final = 8


def current_run() -> str:
    """Return the id of the run that this process belongs to. Raises nothing.

    It is the first of these: the value of `QREWARD_RUN_ID`; the job of Ray; the start of the workers by torchrun, or by
    what uses it; a new id at each call. All but the first have 8 hexadecimal digits.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        return named
    shared = job_name() or _launched()
    if shared is None:
        return uuid.uuid4().hex[:_DIGITS]
    return hashlib.blake2b(shared.encode(), digest_size=_DIGITS // 2).hexdigest()


def _launched() -> str | None:
    """Return the process that has launched the workers of this machine, and how often; None if none has."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return None
    launcher = os.getppid()
    with suppress(OSError):  # only Linux tells
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The system gives a process id to another process later, so the start, the 22nd field, tells them apart. The
        # name of a program may hold blanks and parentheses.
        started = Path(f"/proc/{launcher}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
        return f"launcher {boot} {launcher} {started} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return None


_log = logging.getLogger("qreward_plugins.journal")

ROOM: Final = 4096
"""Number of unwritten entries above which `put` waits, while the file can be written."""

_SELECT: Final = (
    f"SELECT {entries.VERDICT_COLUMNS} FROM outcomes "
    "WHERE key IN ({marks}) AND outcome = 'scored' AND cached = 0 ORDER BY id DESC LIMIT 1"
)


class Journal:
    """Records all outcomes in one SQLite file, which several processes of one machine may share.

    Args:
        path: the file, on a local disk. It is created if it does not exist; its directory must exist.
        clock: returns seconds since 1970 for the column `recorded_at`. Wall-clock time is used here because the record
            outlives the process.
        run_id: the training job, for the column `run_id`. None: what `current_run` finds out.
        keep: whose texts are kept (`texts.Interest`). `rng` draws some of them.
        texts_mb: size of the file in MB (10^6 bytes) above which the oldest texts are deleted.
        redact: regular expressions; what they match in a text is recorded as "[redacted]".

    Opening blocks for some milliseconds. Raises `JournalError` if the file cannot be opened or written, or is not a
    journal of this version.

    Memory does not grow with the number of entries. While the file cannot be written (locked, disk full), about
    `KEPT_ROWS` entries are kept and retried; `aclose` retries for up to `CLOSE_WITHIN_S` seconds. A
    killed process loses the entries of the last 50 ms and the kept ones. A process that exits without `aclose` writes
    them at exit. A forked child must open its own journal.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Callable[[], float] = time.time,
        run_id: str | None = None,
        keep: Keep = "interesting",
        texts_mb: float = math.inf,
        redact: Sequence[str] = (),
        rng: random.Random | None = None,
    ) -> None:
        self.path = os.fspath(path)
        # A variable of the environment may hold bytes that are no text.
        self.run_id = (current_run() if run_id is None else run_id).encode("utf-8", "replace").decode()
        self.read_errors = 0
        """Number of failed look-ups, which returned None."""
        self._clock = clock
        self._interest = Interest(keep, rng or random.Random(0))
        self._redact = redaction(redact)
        self._reading = open_database(self.path)
        try:
            writing = open_database(self.path)
        except JournalError:
            self._reading.close()
            raise
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="qreward-journal-reader")
        self._read_logged = False
        # A process may have several engines, and processes of several nodes the same id.
        self._engine = uuid.uuid4().int >> 66
        self._told: Mapping[str, Mapping[str, Any]] = {}
        self._look: Callable[[], Callable[[frozenset[str]], None] | None] = lambda: None
        self._writer = Writer(self.path, writing, most_bytes=texts_mb * 1e6, on_last=self._close_reading)

    @property
    def write_errors(self) -> int:
        """Number of lost entries: they could not be written, and memory was full or the journal was closed."""
        return self._writer.write_errors

    async def get(self, *keys: str) -> Verdict | None:
        """Return the latest verdict that any process recorded under one of `keys`; None if there is none.

        The verdict is `cached`; its attempts, usage, latency and cost are 0, because a look-up costs nothing. If the
        file cannot be read, returns None, so that the sample is judged again. Raises `JournalError` if closed.
        """
        self._writer.check()
        unwritten = self._writer.verdict(keys)
        if unwritten is not None:
            return unwritten
        try:
            reading = self._reader.submit(self._read, keys)
        except RuntimeError:
            raise JournalError(f"the journal {self.path} is closed") from None
        return await asyncio.wrap_future(reading)

    async def put(self, key: str | None, sample: Sample, outcome: Outcome, history: Sequence[PastAttempt] = ()) -> None:
        """Record an outcome, and the attempts that led to it. Without a key it is recorded, but `get` never returns it.

        The entry is accepted before the call first waits, so a cancellation does not lose it. The call waits only while
        more than `ROOM` entries are unwritten and the file can be written. Raises only `JournalError`, if closed.

        An answer that is used again (`cached`) is only noted for readers. So its entry is never waited for, and it is
        left out while entries that were paid for wait: more than `ROOM`, or any that cannot be written.
        """
        if isinstance(outcome, Scored) and outcome.verdict.cached:
            self._writer.check()
            if not self._writer.is_behind(ROOM):
                self.note(key, sample, outcome, history)
            return
        self.note(key, sample, outcome, history)
        room = self._writer.room(ROOM)
        if room is not None:
            await asyncio.wrap_future(room)

    def note(self, key: str | None, sample: Sample, outcome: Outcome, history: Sequence[PastAttempt] = ()) -> None:
        """Record an outcome as `put` does, without waiting. For rare entries, because it does not limit the memory.

        Any thread may call it. Raises `JournalError` if closed.
        """
        self._writer.check()
        if self._redact is not None:
            outcome, history = entries.redacted(outcome, history, self._redact)
        texts: Texts | None = None
        about: dict[str, entries.Value] = {"key": key, "recorded_at": self._clock(), "run_id": self.run_id}
        about["process_id"] = self._writer.process_id
        try:
            if self._interest.in_texts(sample, outcome, history):
                texts = Texts(self._redact)
            row = entries.row(about, sample, outcome, history, texts)
        except Exception:
            # Texts come from outside, and must not cost the numbers.
            texts = None
            try:
                row = entries.row(about, sample, outcome)
            except Exception as error:
                # A step that is not a number may lose the row, but not the reward.
                self._writer.lost(1, f"an outcome cannot be written ({type(error).__name__})")
                return
        verdict: Verdict | None = None
        if key is not None and isinstance(outcome, Scored) and entries.is_answer(outcome.verdict):
            verdict = entries.as_cached(outcome.verdict)
        self._writer.add(row, verdict, {} if texts is None else texts.by_hash)

    def watch(self, look: Callable[[frozenset[str]], None]) -> None:
        """Call the method `look` about once a second, in a thread, with the sources that are held from outside. It does
        not keep its object alive. It must not raise.
        """
        self._look = WeakMethod(look)
        self._writer.every_second = self._meet

    def tell(self, sources: Mapping[str, Mapping[str, Any]]) -> None:
        """Record how the sources are, by name, for those who look at the run. It is written within a second."""
        redact = self._redact or str
        self._told = {name: {**each, "problem": redact(each["problem"])} for name, each in sources.items()}

    def _meet(self, connection: sqlite3.Connection) -> None:
        """Write how the sources are, and find out which are held. Runs in the writing thread."""
        told, self._told = self._told, {}
        place = (self.run_id, self._engine)
        rows = [
            (*place, name, self._clock(), orjson.dumps(each, option=orjson.OPT_SERIALIZE_NUMPY).decode())
            for name, each in told.items()
        ]
        if rows:
            connection.executemany("INSERT OR REPLACE INTO live VALUES (?, ?, ?, ?, ?)", rows)
        held = connection.execute("SELECT source FROM holds WHERE run_id = ?", (self.run_id,)).fetchall()
        look = self._look()
        if look is not None:
            look(frozenset(source for (source,) in held))

    async def flush(self) -> None:
        """Wait until all earlier entries are in the file.

        Raises `JournalError` if they cannot be written now (they are kept and retried), or if entries were lost since
        this was last raised.
        """
        await asyncio.wrap_future(self._writer.written())
        self._writer.raise_unwritten()

    async def aclose(self) -> None:
        """Write all unwritten entries and end both threads. Idempotent. After a cancellation, closing goes on in the
        background.

        If the file cannot be written, retries for `CLOSE_WITHIN_S` seconds. Raises `JournalError` once if entries are
        lost; everything is closed then, too.
        """
        await asyncio.wrap_future(self._writer.closed())
        self._writer.join()

    def _read(self, keys: tuple[str, ...]) -> Verdict | None:
        try:
            # `fetchall`, because an unfinished statement keeps the WAL from shrinking.
            select = _SELECT.format(marks=", ".join("?" * len(keys)))
            rows = self._reading.execute(select, keys).fetchall()
            return entries.verdict(rows[0]) if rows else None
        except Exception as error:
            self.read_errors += 1
            if not self._read_logged:
                self._read_logged = True
                _log.error("%s; samples are judged again", explained(error, self.path))
            return None

    def _close_reading(self) -> None:
        self._reader.shutdown(wait=True)
        self._reading.close()


class TrainingLog:
    """Records what the trainer made of the samples of training steps, in the journal at `path`.

    The trainer's process writes it beside the reward workers. It gets a step at once and writes in a thread, so that
    training never waits for a disk; a disk that fails costs this record only.

    Args:
        clock: returns seconds since 1970.
        run_id: the training job; None: what `current_run` finds out.
    """

    def __init__(self, path: str, *, clock: Callable[[], float] = time.time, run_id: str | None = None) -> None:
        self._path = path
        self._clock = clock
        self._run_id = run_id
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="qreward-training-log")
        self._warned = False

    def add(self, samples: Sequence[Trained]) -> None:
        """Record the samples of a step, without waiting. Any thread may call it; it raises nothing."""
        with suppress(RuntimeError):  # the interpreter is shutting down
            self._writer.submit(self._write, self._clock(), tuple(samples))

    def flush(self) -> None:
        """Wait until what was added is written, or could not be. A process waits for it at its exit, too."""
        self._writer.submit(int).result()

    def _write(self, at: float, samples: Sequence[Trained]) -> None:
        try:
            # In this thread: to find out the run may ask Ray.
            run_id = self._run_id = current_run() if self._run_id is None else self._run_id
            with closing(open_database(self._path)) as connection:
                rows = [(run_id, at, *sample) for sample in samples]
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany("INSERT INTO trained VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
                connection.execute("COMMIT")
        except Exception as error:
            if not self._warned:
                self._warned = True
                said = str(error) if isinstance(error, JournalError) else explained(error, self._path)
                _log.warning("advantages are not recorded: %s", said)


__all__ = ["VARIABLE", "current_run"]
