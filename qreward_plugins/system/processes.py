"""A pool of processes for work that takes seconds, which would hold up every thread of this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor


def process_pool(processes: int) -> ProcessPoolExecutor:
    """Return a new pool. Its processes leave Ctrl-C to this one, and end with it, even if it is killed.

    Functions, arguments and results must pickle.
    """
    # Forking is unsafe if there are threads.
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)


def terminate(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool at once, whatever they compute. `pool.shutdown` is left to the caller."""
    # Python has a public way to do this from 3.14 on (`terminate_workers`).
    for process in list((getattr(pool, "_processes", None) or {}).values()):
        process.terminate()


def _begin() -> None:
    # Ctrl-C reaches the whole process group; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Python's processes of a pool survive a parent that is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
