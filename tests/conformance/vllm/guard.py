"""Runs a server and ends all of its processes when it exits, or when whoever started it is gone.

vLLM's engine and workers outlive a killed server for ever. So this program leads their process group, and kills the
group.

Usage: python guard.py COMMAND ..., in a new session, with a pipe as standard input that its starter keeps open.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

_LOOK_EVERY_S = 0.5


def main() -> None:
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    while server.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], _LOOK_EVERY_S)
        # Nobody writes to the pipe, so it is readable only at its end.
        if readable:
            break
    print(f"exit code of the server: {server.poll()}", flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
