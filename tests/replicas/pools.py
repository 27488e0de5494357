"""Pools of stand-in servers for tests, and which of their processes live."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from qreward_plugins.replicas import PoolSpec, Topology

STAND_IN = Path(__file__).parent / "stand_in.py"


class StandIns:
    """Makes specs of pools of stand-ins, and knows which of their processes live."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids_file = folder / "pids"

    def command(self, *options: str) -> tuple[str, ...]:
        started = (sys.executable, "-I", "-S", str(STAND_IN), "{port}", "{name}", "{model}")
        return (*started, f"pids={self.pids_file}", "host={host}", *options)

    def spec(self, *options: str, replicas: int = 1, **changes: object) -> PoolSpec:
        settings = {
            "start_within_s": 30.0,
            "stop_within_s": 5.0,
            "command": self.command(*options),
            "log_folder": str(self.folder),
            **changes,
        }
        return PoolSpec("own", "command", "judge", Topology(replicas), **settings)  # type: ignore[arg-type]

    def program(self, *options: str) -> list[str]:
        """The beginning of the command line of stand-ins for vLLM."""
        shared = (f"pids={self.pids_file}", f"fault={self.folder / 'fault'}", f"notes={self.folder / 'notes'}")
        return [sys.executable, "-I", "-S", str(STAND_IN), "vllm", *shared, *options]

    def weights(self, name: str) -> Path:
        """A folder with weights of this name."""
        folder = self.folder / f"weights-{name}"
        folder.mkdir(exist_ok=True)
        (folder / "weights.bin").write_text(name)
        return folder

    def fault(self, word: str) -> None:
        """Let the next stand-in that loads weights, or pauses, do this."""
        (self.folder / "fault").write_text(word)

    def notes(self) -> list[str]:
        """What stand-ins for vLLM were told: names and orders."""
        path = self.folder / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def living(self) -> list[int]:
        """The stand-ins that run, and their children."""
        if not self.pids_file.exists():
            return []
        return [pid for pid in map(int, self.pids_file.read_text().split()) if lives(pid)]


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(*pids: int) -> None:
    """Kill processes. A guard may end them at the same time."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)


def guard_of(server: int) -> int:
    """The guard of a server: it leads the session."""
    return os.getsid(server)


async def comes(condition: Callable[[], object], within_s: float = 180.0) -> None:
    """Wait for something that another process does. On a busy machine that may take a minute."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, f"it does not come within {within_s:g} s"
        await asyncio.sleep(0.01)
