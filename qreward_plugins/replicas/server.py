"""Defines `LocalServer`: one start of one server on this machine, from its process to its end."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from ..system.threads import in_thread
from . import guard
from .control import ServerFailed, fetched
from .pool import Weights
from .server_kinds import Launch, PoolSpec

_NOT_INSTALLED = re.compile(r"No module named '?(\w+)'?\)?\Z")
_TAIL_BYTES = 32768
_TAIL_LINES = 80
"""Lines that are quoted. vLLM writes about 60 after the one with the cause."""
_ASK_EVERY_S = (0.05, 0.5)
_REPLY_S = 5.0
_END_NOTICED_S = 0.1
_GUARD_S = 2.0
"""Seconds beyond the grace time in which a guard ends everything. Then it is killed, and the owner ends the rest. An
engine closes within 10 s, and its process may end then.
"""
_GUARD_KILLED = 128 + signal.SIGKILL
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BESIDE = ("config.json", "generation_config.json", "tokenizer", "vocab", "merges", "special_tokens", "chat_template")
"""Beginnings of the names of other files that change what a server answers."""


class LocalServer:
    """One server process under its guard (`guard.py`). It is started once, and serves until it ends or is stopped. It
    belongs to the event loop in which it was started.

    `number` is that of the replica. `environment` gives the server its devices; default: those of the topology. `host`
    is the address to listen on. Without `log_folder`, its log is in a folder of its own, which `stop` removes.
    """

    def __init__(
        self,
        spec: PoolSpec,
        number: int,
        *,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._spec = spec
        self._number = number
        self._host = host
        self._devices = spec.topology.environment(number) if environment is None else environment
        self._own_folder = None if spec.log_folder else tempfile.mkdtemp(prefix="qreward-logs-")
        folder = Path(spec.log_folder or self._own_folder or "")
        self._log_path = folder / f"{spec.file_name}-{number}.log"
        self._log_from = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._exited: asyncio.Future[int] | None = None
        self._said = b""
        self._mark = ""
        self.url = ""

    @property
    def guard_pid(self) -> int | None:
        """The process id of its guard, which is that of its session."""
        first, complete, _ = self._said.partition(b"\n")
        return int(first) if complete else None

    async def start(self, weights: Weights | None = None) -> str:
        """Start the server, and return its URL once it is ready: our own process lives, and its name is listed. It
        loads `weights`, unless these are loaded in place; default: those of the model.

        There is no time limit here. Raises `ServerFailed` if it ends before. Cancelling leaves it to `stop`.
        """
        weights = weights or Weights()
        # A trainer may have written another checkpoint there; then it is not the one that the others have.
        if weights.path and await self.call("check", path=weights.path) != weights.identity:
            problem = f"the checkpoint {weights.path} is not that of the version {weights.version} any more"
            raise ServerFailed(f"{problem}; update the weights again")
        port, self._mark = free_port(self._host), secrets.token_hex(6)
        name = f"{self._spec.file_name}-{self._number}-{self._mark}"
        exited = self._spawn(Launch(self._spec, name, self._host, port, "" if self._spec.in_place else weights.path))
        url = f"http://{self._host}:{port}"
        if not await self._ready(url, name, exited):
            log = self.log_tail()
            lacks = _NOT_INSTALLED.search(log.rstrip())  # an earlier line may be a mere warning
            remedy = (
                f"; install {lacks[1]} here, or name the Python that has it in `program` of the source" if lacks else ""
            )
            raise ServerFailed(f"it ended before it was ready ({_code(exited.result())}){remedy}", log)
        self.url = url
        return url

    async def ended(self) -> ServerFailed:
        """Wait until the server ends, and return why, as far as that can be told."""
        assert self._exited is not None, "it was not started"
        code = await asyncio.shield(self._exited)
        # An exit code of 0 is no sign of health: vLLM exits with it when its engine has died.
        return ServerFailed(f"it ended ({_code(code)})", self.log_tail())

    async def call(self, operation: str, **arguments: Any) -> Any:
        """Do one of `Control.OPERATIONS`, and return its result. "check" returns the `checkpoint_files` here, and
        needs no server. Raises `ServerFailed` if it fails, or if the server ends meanwhile.
        """
        if operation == "check":
            return await in_thread(lambda: checkpoint_files(arguments["path"], folder=self._spec.in_place))
        control, exited = self._spec.kind.control, self._exited
        assert control is not None, "the server has no routes to control it"
        assert operation in control.OPERATIONS
        assert exited is not None
        routes = control(self.url, self._spec.headers, self._spec.start_within_s)
        call = asyncio.ensure_future(getattr(routes, operation)(**arguments))
        try:
            await asyncio.wait({call, exited}, return_when=asyncio.FIRST_COMPLETED)
            # A server that ends fails its last request before its end is noticed.
            if call.done() and call.exception() is not None:
                await asyncio.wait([exited], timeout=_END_NOTICED_S)
            if exited.done():
                raise await self.ended()
            return call.result()
        except ServerFailed as error:
            raise ServerFailed(error.problem, error.log or self.log_tail()) from None
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def stop(self) -> None:
        """Ask the server to end, and end it after `stop_within_s` seconds, with every process that it has started.
        Idempotent.
        """
        process, exited = self._process, self._exited
        if process is not None and exited is not None:
            await self._end(process, exited)
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    async def _end(self, process: subprocess.Popen[bytes], exited: asyncio.Future[int]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait([exited], timeout=self._spec.stop_within_s + _GUARD_S)
        if not exited.done() and self.guard_pid is not None:
            # It hangs, or was stopped. It lives as long as its pipe is open, so no other process has its number.
            with suppress(ProcessLookupError):
                os.kill(self.guard_pid, signal.SIGKILL)
        await asyncio.shield(exited)

    def log_tail(self) -> str:
        """Return the last lines of its log since its start."""
        try:
            with self._log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_from if size >= self._log_from else 0, size - _TAIL_BYTES))
                text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def _spawn(self, launch: Launch) -> asyncio.Future[int]:
        """Start the server under a guard. Return the future with its exit code."""
        spec, self._said = self._spec, b""
        try:
            self._log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            problem = f"its log {self._log_path} cannot be written ({error.strerror}). See `log_folder`"
            raise ServerFailed(problem) from None
        try:
            self._log_from = os.fstat(log).st_size
            started = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(spec.stop_within_s)]
            marked = {guard.MARK: self._mark}
            self._process = subprocess.Popen(
                [*started, *spec.kind.command(launch)],
                env={**os.environ, **spec.kind.environment(launch), **self._devices, **spec.environment, **marked},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        except OSError as error:
            raise ServerFailed(f"no process can be started ({error.strerror})") from None
        finally:
            os.close(log)
        loop = asyncio.get_running_loop()
        self._exited = loop.create_future()
        assert self._process.stdout is not None
        loop.add_reader(self._process.stdout.fileno(), self._hear, self._process, self._exited)
        return self._exited

    def _hear(self, process: subprocess.Popen[bytes], exited: asyncio.Future[int]) -> None:
        """Read what the guard says: its process id, and at last the exit code of the server."""
        assert process.stdout is not None
        assert process.stdin is not None
        process.wait()  # the guard is its child, so it has ended at once
        heard = os.read(process.stdout.fileno(), 64)
        if heard:
            self._said += heard
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.stdout.fileno())
        process.stdout.close()
        process.stdin.close()
        told, mark = [int(line) for line in self._said.split()], self._mark
        if len(told) > 1:
            exited.set_result(told[1])
            return
        sweep = in_thread(lambda: guard.end_session(told[0] if told else -1, mark))
        sweep.add_done_callback(lambda _: exited.set_result(_GUARD_KILLED))

    async def _ready(self, url: str, name: str, exited: asyncio.Future[int]) -> bool:
        """Wait until `name` is listed; False if the process ends before."""
        pause_s, most_s = _ASK_EVERY_S
        while not exited.done():
            # Another program may have the port, and answer every question but this one. vLLM with a key lists its
            # models only for requests with this key.
            if name in await _listed(url, self._spec.headers) and not exited.done():
                return True
            await asyncio.wait([exited], timeout=pause_s)
            pause_s = min(most_s, 1.5 * pause_s)
        return False


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port of `host`, which the system gives to nobody else for about a minute.

    A server binds its port seconds after it was started. Meanwhile the system may give a port that is merely free to
    any connection of any program. So a connection to this port is made and closed: the port is then in the state
    TIME_WAIT, in which the system does not hand it out, and a server may listen on it (`SO_REUSEADDR`).
    """
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, 0))
        listening.listen(1)
        port: int = listening.getsockname()[1]
        with socket.create_connection((host, port)):
            accepted, _ = listening.accept()
            # The side that closes first is the one in TIME_WAIT.
            accepted.close()
    return port


def checkpoint_files(path: str, *, folder: bool) -> str:
    """Return a hash of the files of the checkpoint at `path`, by their names, sizes and times of change. It is equal
    for the same files. `folder`: the server loads no single file.

    Raises `ServerFailed` for a path without a checkpoint. It blocks for as long as the file system takes.
    """
    place = Path(path)
    try:
        if not place.exists():
            raise ServerFailed(f"{path} does not exist")
        if folder and not place.is_dir():
            # The server would take it for a name of the hub, and refuse it only after the replica was drained.
            raise ServerFailed(f"{path} is a file, and folders are loaded in place; name its folder, {place.parent}")
        found = [file for file in (sorted(place.iterdir()) if place.is_dir() else [place]) if file.is_file()]
        weights = {file.name for file in found if file.name.endswith(_WEIGHTS)}
        if not weights:
            raise ServerFailed(f"{path} holds no weights ({', '.join('*' + suffix for suffix in _WEIGHTS)})")
        digest = hashlib.blake2b(digest_size=16, person=b"qreward weights")
        for file in (file for file in found if file.name in weights or file.name.startswith(_BESIDE)):
            about = file.stat()
            digest.update(f"{file.name}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
    except OSError as error:
        raise ServerFailed(f"{error.filename or path}: {error.strerror or error}") from None
    return digest.hexdigest()


async def _listed(url: str, headers: Mapping[str, str]) -> set[str]:
    """Return the models that a server lists; none if it does not answer with such a list."""
    try:
        _, body = await fetched("GET", f"{url}/v1/models", within_s=_REPLY_S, headers=headers)
        return {str(model["id"]) for model in orjson.loads(body or b"")["data"]}
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError, KeyError, TypeError):
        return set()


def _code(code: int) -> str:
    # A shell, or our guard, turns signal 9 into the exit code 137.
    try:
        return f"by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exit code {code}"
