"""Runs a player and ends it when its parent is gone.

    python -m conformance.parents MODULE ARGUMENTS ...

A killed pytest ends nothing that it started. A player in the middle of a request would play on for ever, with its Ray
and a busy core, because it reads the end of its input only after the request. So a thread watches the parent, from
before the player's imports on.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

_LOOK_EVERY_S = 0.5


def main() -> None:
    threading.Thread(target=_watch, args=(os.getppid(),), name="parent-watch", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    # Ray's processes follow: Ray has the kernel end them with the process that started it.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
