"""Records what the trainer made of rewards: the number that trained, the advantage, and who was left out.

The trainer's process writes it into the journal of the run, beside the reward workers. It gets a step at once and
writes in a thread, so that training never waits for a disk; a disk that fails costs this record only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import NamedTuple

from ..errors import JournalError
from .database import explained, open_database
from .journal import current_run

_log = logging.getLogger("qreward_plugins.journal")


class Trained(NamedTuple):
    """What became of one sample. `reward` is the number that it trains as, `advantage` the mean over the tokens of its
    response. `masked`: it is kept out of training.
    """

    sample_id: str
    group_id: str | None
    step: int | None
    reward: float
    advantage: float | None
    masked: bool


class TrainingLog:
    """Records the samples of training steps in the journal at `path`.

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
