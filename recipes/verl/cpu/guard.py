"""Runs the trainer, and ends it when the program that started this one is gone, even if that was killed.

    python guard.py COMMAND ...    (in a new session; its standard input is a pipe that the starter keeps open)

Exits with the trainer's exit code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

_END_WITHIN_S = 20.0


def main() -> int:
    # The starter's signal to the group is for the trainer, which does not inherit a handler as it would SIG_IGN.
    signal.signal(signal.SIGTERM, lambda *_: None)
    trainer = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_starter, args=(trainer,), daemon=True).start()
    code = trainer.wait()
    return code if code >= 0 else 128 - code


def _end_with_starter(trainer: subprocess.Popen[bytes]) -> None:
    os.read(0, 1)  # nobody writes to the pipe, so this returns at its end
    # Ray ends its own processes when the trainer gets this signal; the rest of its group is killed.
    trainer.terminate()
    try:
        trainer.wait(_END_WITHIN_S)
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
