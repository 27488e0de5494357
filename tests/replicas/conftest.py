"""Pools of stand-in servers for tests, and which of their processes live."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from qreward_plugins.replicas import PoolSpec, Topology
from qreward_plugins.replicas.control import ServerFailed
from tests.kit import lives

STAND_IN = Path(__file__).parent / "stand_in.py"


def configured(own: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The tree of a configuration: one LLM judge over servers that are started."""
    own = {"kind": "replicas", "model": "judge", "platform": "cpu", "start_within_s": 30.0, **own}
    judge = {"kind": "llm", "score_range": [0, 10], "max_tokens": 64}
    return {"sources": {"own": own}, "judges": {"quality": judge}, "engine": {"seed": 7}, **more}


def said(outcomes: list[Any]) -> list[str]:
    """The rationales of outcomes that are all scored."""
    assert [outcome.describe() for outcome in outcomes if outcome.reward is None] == []
    return [outcome.verdict.rationale for outcome in outcomes]


def replicas(engine: Any) -> Any:
    return engine.upstreams["own"].source.replicas


def states(engine: Any) -> list[str]:
    return [replica.state for replica in replicas(engine)]


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

    def tree(self, *options: str, engine: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """The tree of a configuration over two stand-ins for vLLM with these options; `more` are keys of the source."""
        own = {"server": "vllm", "program": self.program(*options), "model": str(self.weights("first"))}
        own |= {"data_parallel": 2, "weight_updates": "in_place", **more}
        return configured(own, engine={"seed": 7, **(engine or {})})

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

    def events(self, *names: str) -> list[str]:
        """Which of these orders (default: all) were given, in order. Trainers of tests note in the same file."""
        events = [line.split()[1].partition("?")[0] for line in self.notes()]
        return [event for event in events if not names or event in names]

    def living(self) -> list[int]:
        """The stand-ins that run, and their children."""
        if not self.pids_file.exists():
            return []
        return [pid for pid in map(int, self.pids_file.read_text().split()) if lives(pid)]


@pytest.fixture
def stand_ins(tmp_path: Path) -> Iterator[StandIns]:
    made = StandIns(tmp_path)
    yield made
    left = made.living()
    kill(*left)
    assert left == []


@pytest.fixture
def early_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qreward_plugins.replicas.pool._BACKOFF_S", (0.0, 0.0))


class Server:
    """A server in this process that needs a few steps of the loop for everything."""

    endless = False
    """Whether updates from memory end with the server only."""

    def __init__(self, _: Any, number: int) -> None:
        self.number = number
        self.url, self.has, self.paused, self.stopped = "", "", False, asyncio.Event()

    async def start(self, weights: Any) -> str:
        await asyncio.sleep(0)
        self.url, self.has = f"http://{self.number}/{id(self)}", weights.path
        return self.url

    async def ended(self) -> ServerFailed:
        await self.stopped.wait()
        return ServerFailed("it ended")

    async def stop(self) -> None:
        await asyncio.sleep(0)
        self.stopped.set()

    async def call(self, operation: str, **arguments: Any) -> str:
        await asyncio.sleep(0)
        if self.stopped.is_set() and operation != "check":
            raise ServerFailed("it ended")
        if operation == "resume":
            for _ in range(0 if self.number else 60):
                await asyncio.sleep(0)
        if operation in ("pause", "sleep", "resume", "wake"):
            self.paused = operation in ("pause", "sleep")
        elif operation == "receive" and self.endless:
            await self.stopped.wait()
        elif operation in ("load", "receive"):
            self.has = "half"
            await asyncio.sleep(0)
            self.has = (arguments.get("path") or arguments["version"]).removeprefix("first")  # the configuration's
        return str(arguments["path"]) if operation == "check" else ""


def kill(*pids: int) -> None:
    """Kill processes. A guard may end them at the same time."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)


def guard_of(server: int) -> int:
    """The guard of a server: it leads the session."""
    return os.getsid(server)
