"""Defines `LocalServer`: one start of one server on this machine, from its process to its end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from ..system.threads import in_thread
from . import guard
from .control import ControlFailed
from .operations import ServerOperations
from .orphans import SUFFIX, end_orphans
from .ports import free_port
from .server_kinds import SERVER_KINDS
from .spec import PoolSpec
from .weights import Weights

_log = logging.getLogger("qreward_plugins.replicas")

LOG_BYTES = 16 * 2**20
"""Largest size of a log file; the one before it is kept, too."""
_TAIL_BYTES = 8192
_TAIL_LINES = 30
_ASK_EVERY_S = (0.05, 0.5)
_REPLY_S = 5.0
_END_NOTICED_S = 0.1
_REPLY_BYTES = 2**20
_GUARD_S = 25.0
"""Seconds beyond the grace time in which a guard ends everything; processes that hang in the kernel take longest."""
_CAUSES = {
    signal.SIGILL: "its program needs a newer CPU",
    signal.SIGKILL: "perhaps memory ran out",
}
"""What signals that a server did not raise itself may mean."""
_PORT_TRIES = 3
_PORT_TAKEN = re.compile(r"address already in use|address in use|errno 98\b", re.IGNORECASE)


class ServerFailed(Exception):
    """A server did not get ready, or has ended. `log` are the last lines that it wrote, not redacted."""

    def __init__(self, problem: str, log: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.log = log


class LocalServer:
    """One server process under its guard. It is started once, and serves until it ends or is stopped.

    `number` is that of the replica. `folder` is that of the log files. `host` is the address to listen on; `shown_host`
    is the one in the URL. `held` are descriptors that stay open until every process of the server has ended. `private`
    is the directory in which its guard notes it (`orphans.py`); default: it notes nothing.
    """

    def __init__(
        self,
        spec: PoolSpec,
        number: int,
        *,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        held: tuple[int, ...] = (),
        private: Path | None = None,
        token: Callable[[], str] = lambda: secrets.token_hex(6),
    ) -> None:
        self._spec = spec
        self._number = number
        self._host = host
        self._held = held
        self._token = token
        self._kind = SERVER_KINDS[spec.server]
        self._devices = spec.topology.environment(number) if environment is None else environment
        self._private = private
        self._note: Path | None = None
        self._log_path = folder / f"{spec.file_name}-{number}.log"
        self._log_from = 0
        self._guard: subprocess.Popen[bytes] | None = None
        self._exited: asyncio.Future[int] | None = None
        self.lacks = ""
        """Why it is not ready yet: what its port said last."""
        self.url = ""
        self.port: int | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the guard."""
        return self._guard.pid if self._guard is not None else None

    async def start(self, weights: Weights | None = None) -> str:
        """Start the server, and return its URL once it is ready: our own process lives, and its name is listed. It
        loads `weights`, unless these are loaded in place; default: those of the model.

        There is no time limit here. Raises `ServerFailed` if it ends before. Cancelling leaves it to `stop`.
        """
        if weights is not None and weights.path:
            found = await self.call("check", path=weights.path)
            # A trainer may have written another checkpoint there; then it is not the one that the others have.
            if found["files"] != weights.files:
                problem = f"the checkpoint {weights.path} is not that of the version {weights.version} any more"
                raise ServerFailed(f"{problem}; update the weights again")
        await self._end_orphans()
        for attempt in range(_PORT_TRIES):
            self.port = free_port(self._host)
            name = f"{self._spec.file_name}-{self._number}-{self._token()}"
            exited = self._spawn(name, self.port, weights)
            url = f"http://{self._host}:{self.port}"
            if await self._ready(url, name, exited):
                self.url = url
                return url
            self._close_pipe()
            log = self.log_tail()
            if not (_PORT_TAKEN.search(log) and attempt + 1 < _PORT_TRIES):
                raise ServerFailed(f"it ended before it was ready ({_code(exited.result())})", log)
        raise AssertionError("unreachable")

    async def ended(self) -> ServerFailed:
        """Wait until the server ends, and return why, as far as that can be told."""
        assert self._exited is not None, "it was not started"
        code = await asyncio.shield(self._exited)
        # An exit code of 0 is no sign of health: vLLM exits with it when its engine has died.
        return ServerFailed(f"it ended ({_code(code)})", self.log_tail())

    async def call(self, operation: str, **arguments: Any) -> Any:
        """Call this method of `ServerOperations`, and return its result. Raises `ServerFailed` if it fails, or if the
        server ends meanwhile.
        """
        operations = ServerOperations(self._spec, self._kind.control, self.url)
        call = asyncio.ensure_future(ServerOperations.named(operation)(operations, **arguments))
        # The files of a checkpoint can be read without a server.
        exited = None if operation == "check" else self._exited
        try:
            await asyncio.wait({call} if exited is None else {call, exited}, return_when=asyncio.FIRST_COMPLETED)
            # A server that ends fails its last request before its end is noticed.
            if call.done() and call.exception() is not None and exited is not None:
                await asyncio.wait([exited], timeout=_END_NOTICED_S)
            if exited is not None and exited.done():
                raise await self.ended()
            return call.result()
        except ControlFailed as error:
            raise ServerFailed(str(error), self.log_tail()) from None
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def stop(self) -> None:
        """Ask the server to end, and end it after `stop_within_s` seconds, with every process that it has started.
        Idempotent.
        """
        process, exited = self._guard, self._exited
        if process is None or exited is None:
            return
        self._close_pipe()
        await asyncio.wait([exited], timeout=self._spec.stop_within_s + _GUARD_S)
        for number in (signal.SIGUSR1, signal.SIGKILL):
            if not exited.done():
                process.send_signal(number)
                await asyncio.wait([exited], timeout=_GUARD_S)
        if self._note is not None and self._note.exists():  # the guard was killed
            await self._end_orphans()
        if not exited.done():
            _log.warning("the processes of replica %d of %s do not end", self._number, self._spec.name)

    async def _end_orphans(self) -> None:
        """End this user's unsupervised servers: they hold devices."""
        folder = self._private
        if folder is not None:
            await in_thread(lambda: end_orphans(folder))

    def _close_pipe(self) -> None:
        """Close the pipe to the guard, which tells it to end the server."""
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError):
                self._guard.stdin.close()

    def log_tail(self) -> str:
        """Return the last lines of its log since its start."""
        try:
            with self._log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begin = self._log_from if size >= self._log_from else 0
                file.seek(max(begin, size - _TAIL_BYTES))
                text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def _spawn(self, name: str, port: int, weights: Weights | None) -> asyncio.Future[int]:
        spec = self._spec
        launch = spec.launch(name, self._host, port, weights)
        command = self._kind.command(launch)
        try:
            # The guard could not say it: its output is the log.
            with open(self._log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
                self._log_from = log.tell()
        except OSError as error:
            raise ServerFailed(f"its log {self._log_path} cannot be written ({error.strerror})") from None
        program = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(spec.stop_within_s)]
        try:
            self._guard = subprocess.Popen(
                [*program, str(self._log_path), str(LOG_BYTES), *self._noted(), *command],
                env={**os.environ, **self._kind.environment(launch), **self._devices, **spec.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=self._held,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerFailed(f"no process can be started ({error.strerror})") from None
        self._exited = _exit_of(self._guard)
        return self._exited

    def _noted(self) -> list[str]:
        """Return the arguments of the guard for the note of its server."""
        if self._private is None:
            return ["", ""]
        self._note = self._private / f"{self._spec.key}.{self._number}-{secrets.token_hex(4)}{SUFFIX}"
        devices = self._spec.topology.shown_devices(self._number)
        label = {"source": self._spec.name, "replica": self._number, "devices": devices}
        return [str(self._note), json.dumps(label)]

    async def _ready(self, url: str, name: str, exited: asyncio.Future[int]) -> bool:
        """Wait until `name` is listed; False if the process ends before."""
        pause_s, most_s = _ASK_EVERY_S
        timeout = aiohttp.ClientTimeout(total=_REPLY_S)
        # vLLM with a key lists its models only for requests with this key.
        async with aiohttp.ClientSession(timeout=timeout, headers=self._spec.headers) as session:
            while not exited.done():
                # Another program may have the port, and answer every question but this one.
                listed, self.lacks = await _listed(session, url)
                if name in listed and not exited.done():
                    return True
                if listed:
                    self.lacks = f"{url}/v1/models lists {', '.join(sorted(listed))}, and not the name {name}"
                await asyncio.wait([exited], timeout=pause_s)
                pause_s = min(most_s, 1.5 * pause_s)
        return False


async def _listed(session: aiohttp.ClientSession, url: str) -> tuple[set[str], str]:
    """Return the models that a server lists, or why there are none."""
    place = f"{url}/v1/models"
    try:
        async with session.get(place, allow_redirects=False) as reply:
            if reply.status != 200:
                return set(), f"{place} answers {reply.status}"
            body = bytearray()
            async for piece in reply.content.iter_any():
                body += piece
                if len(body) > _REPLY_BYTES:
                    break
        import orjson

        return {str(model["id"]) for model in orjson.loads(body)["data"]}, f"{place} lists nothing"
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        return set(), f"{place} does not answer"
    except (ValueError, KeyError, TypeError):
        return set(), f"{place} answers something else than a list of models"


def _exit_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """Return a future of the running loop with the exit code. A thread waits for it, so that any event loop will do."""
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[int] = loop.create_future()

    def tell(code: int) -> None:
        if not exited.done():
            exited.set_result(code)

    def wait() -> None:
        code = process.wait()
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell, code)

    threading.Thread(target=wait, name="qreward-replica", daemon=True).start()
    return exited


def _code(code: int) -> str:
    # A shell, or our guard, turns signal 9 into the exit code 137.
    number = -code if code < 0 else code - 128
    try:
        raised = signal.Signals(number)
    except ValueError:
        return f"exit code {code}"
    return f"by {raised.name}: {_CAUSES[raised]}" if raised in _CAUSES else f"by {raised.name}"
