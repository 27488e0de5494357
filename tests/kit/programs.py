"""Programs in processes of their own, which end with their test."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAFETY_S = 30.0
"""Longest wait for another process, in seconds. Only a test that fails waits so long."""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for something that another process does, and fail when it does not."""
    give_up_at = time.monotonic() + SAFETY_S
    while not condition():
        assert time.monotonic() < give_up_at, "waited in vain"
        threading.Event().wait(0.01)


async def comes(condition: Callable[[], Any], within_s: float = 180.0) -> Any:
    """As `wait_until` in an event loop; return what `condition` found. On a busy machine it may take a minute."""
    give_up_at = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < give_up_at, f"it does not come within {within_s:g} s"
        await asyncio.sleep(0.005)
    return found


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not: nobody hurries to reap what a killed worker leaves behind."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Program:
    """A command in a process group of its own. Leaving the context kills the group.

    `command`: arguments of Python, such as `("-m", "qreward_plugins.cli", "check", path)`, or `("-c", text)`. Further
    attributes are those of `Popen`.
    """

    def __init__(self, *command: object, cwd: Path | None = None, **options: Any) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self._popen = subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=cwd, start_new_session=True, **{**pipes, **options}
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._popen, name)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.clean_up()

    def line(self, part: str) -> str:
        """Wait for a line of its output that contains `part`, and return it."""
        timer = threading.Timer(SAFETY_S, self._kill)
        timer.start()
        try:
            for line in self._popen.stdout or ():
                if part in line:
                    return str(line)
        finally:
            timer.cancel()
            timer.join()
        raise AssertionError(f"no line with {part!r}; it ended with {self.end(0)}")

    def end(self, number: int = signal.SIGKILL) -> tuple[int, str, str]:
        """Send a signal (0: none), and return the exit code and the rest of what was printed."""
        if number:
            self._popen.send_signal(number)
        out, err = self._popen.communicate(timeout=SAFETY_S)
        return self._popen.returncode, out or "", err or ""

    def clean_up(self) -> None:
        self._kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()

    def _kill(self) -> None:
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
