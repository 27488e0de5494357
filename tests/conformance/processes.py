"""The process in which a framework plays: requests go to it and answers come back as JSON, one a line.

Frameworks keep state where no test can reset it, and some hang when they fail. So each has a process of its own, in
which a module of the tests (`player`) listens, and nobody waits for an answer longer than a watchdog allows.

    python -m conformance.processes MODULE ARGUMENTS ...     run a player; it ends when its parent is gone

A killed pytest ends nothing that it started. A player in the middle of a request would play on for ever, with its Ray
and a busy core, because it reads the end of its input only after the request. So a thread watches the parent, from
before the player's imports on.
"""

from __future__ import annotations

import json
import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import pytest

import qreward_plugins

PROJECT = Path(qreward_plugins.__file__).parents[1]
RECIPES = PROJECT / "recipes"
ENDPOINTS = dict.fromkeys(("JUDGE_BASE_URL", "HOSTED_BASE_URL", "HOSTED_MODEL"), "http://127.0.0.1:1/v1")
SECRET = "sk-never-shown"

_LOOK_EVERY_S = 0.5
_LEAVING_S = 30.0
_TOLD_OF_LOG = 6000
"""Characters of the end of the log that an error shows."""


class PlayerDied(AssertionError):
    """The process ended or hung. The message has the end of its log, with all stacks if it hung."""


@dataclass(frozen=True)
class Reply:
    """What the player answered: a result, or the error that ended the run."""

    result: Any
    error: str | None
    text: str
    said: tuple[str, ...]
    """Warnings of the adapter."""
    complaints: tuple[str, ...]
    """What Python found wrong."""


def checkout(framework: str, variable: str, file: str, modules: Sequence[str], remedy: str) -> Path:
    """The checkout of a framework that an environment variable names; skips the test where it cannot be played."""
    path = os.environ.get(variable)
    missing = [module for module in modules if find_spec(module) is None]
    if not path:
        pytest.skip(f"{variable} is not set: {remedy}")
    if not (Path(path) / file).is_file():
        pytest.skip(f"{variable}={path} is not a checkout of {framework}: it has no {file}")
    if missing:
        pytest.skip(f"{framework} needs {', '.join(missing)}: {remedy}")
    return Path(path).resolve()


def environment(framework: str, path: Sequence[Path], **more: str) -> dict[str, str]:
    """The variables of a framework's process, without those that would change what it plays."""
    odd = (f"{framework.upper()}_", "QREWARD_", "RAY_")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(odd)},
        "PYTHONPATH": os.pathsep.join(map(str, (*path, PROJECT, Path(__file__).parents[1]))),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        **more,
    }


def serve(player: Any, replies: TextIO, hear: Callable[[], dict[str, list[str]]]) -> None:
    """In the process: have the player do each request, and answer with what it returned or raised, and what was heard
    meanwhile.
    """
    for line in sys.stdin:
        request = json.loads(line)
        told: dict[str, Any] = {}
        try:
            told["result"] = getattr(player, request.pop("do"))(**request)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            cause = getattr(error, "cause", None) or error
            told["error"], told["text"] = type(cause).__name__, f"{cause}\n{error}"
        replies.write(json.dumps(told | hear()) + "\n")
        replies.flush()


class PlayerProcess:
    """A framework's process. A context manager; requests may come from any thread. It starts with the first request,
    and again with the first after one that brought it down.

    `start_s` is what the first request may take, which waits for imports from a cold disk, `watchdog_s` any further.
    """

    def __init__(
        self,
        framework: str,
        module: str,
        folder: Path,
        environment: Mapping[str, str],
        *,
        start_s: float,
        watchdog_s: float,
    ) -> None:
        self.folder = folder
        self.arguments: tuple[str, ...] = (str(folder),)
        self._framework = framework
        self._module = module
        self._environment = environment
        self._start_s = start_s
        self._watchdog_s = watchdog_s
        self._log = folder / "player.log"
        self._process: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_LEAVING_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self._reader.join()
        self._process.stdout.close()

    def start(self) -> None:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "conformance.processes", self._module, *self.arguments],
                cwd=self.folder,
                env=dict(self._environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Its children go with it, should it have to be killed.
                start_new_session=True,
            )
        self._replies: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"{self._framework}-player", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask(self, do: str, *, timeout_s: float | None = None, **fields: Any) -> Reply:
        """Have something done, and wait for it. Raises `PlayerDied` when no answer comes."""
        with self._lock:
            allowed_s = self._watchdog_s if timeout_s is None else timeout_s
            if not self.alive:
                self.__exit__()
                self.start()
                allowed_s = max(allowed_s, self._start_s)
            try:
                self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
                self._process.stdin.flush()
                line = self._replies.get(timeout=allowed_s)
            except BrokenPipeError:
                line = ""
            except queue.Empty:
                # Its stacks go to the log.
                self._process.send_signal(signal.SIGABRT)
                self._process.wait()
                self._kill()
                raise PlayerDied(
                    f"{self._framework} hangs: no end of {do!r} in {allowed_s:g} s\n{self._tail()}"
                ) from None
        if not line:
            self._kill()
            raise PlayerDied(f"the process of {self._framework} died in {do!r}\n{self._tail()}")
        told = json.loads(line)
        return Reply(
            told.get("result"), told.get("error"), told.get("text", ""), tuple(told["said"]), tuple(told["complaints"])
        )

    def must(self, do: str, **fields: Any) -> Any:
        """As `ask`, where an error and a complaint of Python's are a failed test. Returns the result."""
        reply = self.ask(do, **fields)
        assert reply.error is None, f"{reply.error}: {reply.text}\n{self._tail()}"
        assert not reply.complaints, "\n".join(reply.complaints)
        return reply.result

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-_TOLD_OF_LOG:]


def watch(parent: int) -> None:
    """End this process when its parent is another one than that."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    # Ray's processes follow: Ray has the kernel end them with the process that started it.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def dry_run(framework: str, recipe: str, folder: Path, environment: Mapping[str, str], *options: str) -> set[str]:
    """The checks that fail in the dry run of a recipe, on endpoints that do not answer."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(RECIPES / framework / "run.sh"), recipe, "--dry-run", "--offline", *options],
        env={**environment, **ENDPOINTS, "PATH": path, "HOSTED_API_KEY": SECRET},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    return {line.partition("  ")[0].strip() for line in done.stdout.splitlines() if " FAIL " in line}


if __name__ == "__main__":
    threading.Thread(target=watch, args=(os.getppid(),), name="parent-watch", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
