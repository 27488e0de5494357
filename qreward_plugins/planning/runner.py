"""Runs rehearsals, one after the other or in several processes, and reports progress."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType

from ..errors import EngineError
from .rehearsal import Rehearsal, Run

Task = tuple[Rehearsal, int, bool]
"""The rehearsal, its seed, and whether to keep the timeline."""


class Runner:
    """Runs tasks. It is a context manager that ends its processes. Their number does not change a result."""

    def __init__(self, processes: int, progress: Callable[[int, int], None] | None = None) -> None:
        self._progress = progress
        self._done = self._total = 0
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            # Forking is unsafe if the caller has threads.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin)

    def run(self, tasks: Sequence[Task]) -> list[Run]:
        """Run all tasks and return their results in order.

        An error of `progress` passes through, and ends every process at once. Raises `EngineError` if a process dies.
        """
        self._total += len(tasks)
        self._tell(0)
        if self._pool is None:
            return [self._one(task) for task in tasks]
        futures = [self._pool.submit(_rehearse, task) for task in tasks]
        waiting = set(futures)
        while waiting:
            # `progress` is called regularly, even without a new result, because it may raise to stop the run.
            done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            self._tell(len(done))
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise EngineError("a rehearsal process died, maybe for lack of memory; plan fewer samples") from None

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        # Python has a public way to do this from 3.14 on (`terminate_workers`).
        workers = list((getattr(self._pool, "_processes", None) or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        if error is not None:
            for worker in workers:
                worker.terminate()
        self._pool.shutdown(wait=True)

    def _one(self, task: Task) -> Run:
        run = _rehearse(task)
        self._tell(1)
        return run

    def _tell(self, done: int) -> None:
        self._done += done
        if self._progress is not None:
            self._progress(self._done, self._total)


def _rehearse(task: Task) -> Run:
    rehearsal, seed, record = task
    return rehearsal.run(seed, record=record)


def _begin() -> None:
    # Ctrl-C reaches the whole process group; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
