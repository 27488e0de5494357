"""Defines `LocalPoolUse`: the use of a pool on this machine, which all processes of a user share.

`pool_process.py` is the other end of its connection.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from ..errors import ConfigurationError
from ..system.private_directory import private_directory
from ..system.processes import command_line, is_own_user, is_stopped, own_processes
from .group_weights import GroupWeights
from .lock_files import locked, remove_left
from .pool import PoolFailed
from .pool_search import START, RunningPool, chosen
from .pool_use import PoolUse
from .spec import PoolSpec

_log = logging.getLogger("qreward_plugins.replicas")

_PROGRAM = (
    # The child of a child: Ray kills the children of an actor, and the pool serves other processes, too.
    "import os, sys\nif os.fork(): os._exit(0)\n"
    "import json; sys.path[:] = json.loads(sys.argv[4])\n"
    "from qreward_plugins.replicas.pool_process import main; main(int(sys.argv[1]), *sys.argv[2:4])"
)
LINE_BYTES = 2**24
"""Most bytes of a message to a pool. It reads no longer one, and would take its user for gone."""
BACKLOG = 1024
"""Most connections that a pool has not accepted."""
_CONNECT_TRIES = 40
_BETWEEN_TRIES_S = 0.05
_DESCRIBED_WITHIN_S = 2.0
_POOL = "[0-9a-f]" * 16
"""The key of a pool, as a pattern."""


class LocalPoolUse(PoolUse):
    """The use of a pool on this machine, which ends with its last user."""

    def __init__(self, spec: PoolSpec, groups: GroupWeights | None = None) -> None:
        super().__init__(spec, groups)
        self._channel: socket.socket | None = None
        self._is_connected = False
        """Whether the pool has the spec, which is the first thing that it reads."""
        self._path: Path | None = None
        """The socket of the pool that was asked last."""
        self._sending = threading.Lock()
        # A forked child would keep the connection open, and with it the servers, after this process has ended.
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (method := forget()) is not None and method())

    def follow(self) -> None:
        while not self._is_leaving():
            for attempt in range(_CONNECT_TRIES):
                channel = self._channel = self._connect()
                with channel, suppress(OSError):
                    known = {"weights": self.weights.as_mapping(), "asleep": self.asleep, "starts": not self.is_guest}
                    channel.sendall(self.spec.to_json() + b"\n" + orjson.dumps(known) + b"\n")
                    self._is_connected = True
                    self._resend()
                    if self._is_leaving():
                        self.leave(at_once=self.is_guest)
                    try:
                        with channel.makefile("rb") as lines:
                            was_open = self._listen(lines)
                    finally:
                        self._is_connected = False
                        self._lose_commands()
                    if was_open or self._is_leaving():
                        break
                # That pool was about to end.
                time.sleep(_BETWEEN_TRIES_S * min(attempt + 1, 10))
            else:
                raise PoolFailed("the process of the pool ends at once")
            self._channel = None
            self._lost()
            if not self._is_leaving():
                self._count_loss()

    def _listen(self, lines: Any) -> bool:
        """Handle the messages of the pool until its end. Return whether there was any."""
        any_line = False
        for line in lines:
            any_line = True
            self._receive(orjson.loads(line))
        return any_line

    def send(self, message: Mapping[str, Any]) -> bool:
        line = orjson.dumps(message) + b"\n"
        if len(line) > LINE_BYTES:
            raise ValueError(f"all bodies together take {len(line):,} bytes; {LINE_BYTES:,} are possible")
        with suppress(OSError), self._sending:
            channel = self._channel
            if channel is not None and self._is_connected:
                channel.sendall(line)
                return True
        return False

    def leave(self, *, at_once: bool = False) -> None:
        channel = self._channel
        if channel is not None:
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR if at_once else socket.SHUT_WR)

    def _search(self, folder: Path) -> socket.socket:
        """Connect to the pool that the configuration means. Raises `PoolFailed` if none runs, or none can be told."""
        pools, silent = [], ""
        for path in sorted(folder.glob(f"{_POOL}.sock")):
            self._path = path
            described = _described(path)
            if described:
                pools.append(RunningPool.of(path.stem, f"process {_pool_pid(path) or 'unknown'}", described))
            elif described is not None:
                silent += f"; {self.where()} answers nothing. {self.remedy()}"
        meant = chosen(self.spec, self.unwritten, pools)
        found = None if meant is None else _connected(folder / f"{meant.key}.sock")
        if meant is None or found is None:
            problem = f"no servers of it run for this user on this machine (the directory is {folder})"
            raise PoolFailed(f"{problem}{silent or START}")
        self._path = folder / f"{meant.key}.sock"
        if meant.topology is not None:
            self.spec = replace(self.spec, topology=meant.topology)
        return found

    def where(self) -> str:
        path = self._socket_path()
        pid = _pool_pid(path)
        return f"the process {pid} of its pool ({path})" if pid else f"the process of its pool ({path})"

    def remedy(self) -> str:
        pid = _pool_pid(self._socket_path())
        if not pid:
            return "Nothing was started in its place"
        end = f"end it, and its servers, with `kill -9 {pid}`"
        remedy = f"It is stopped: let it go on with `kill -CONT {pid}`, or {end}" if is_stopped(pid) else end
        return f"{remedy[0].upper()}{remedy[1:]}; nothing is started in its place before"

    def _socket_path(self) -> Path:
        return self._path or private_directory(self.spec.directory) / f"{self.spec.key}.sock"

    def _forget(self) -> None:
        if self._channel is not None:
            with suppress(OSError):
                os.close(self._channel.detach())

    def _connect(self) -> socket.socket:
        """Connect to the pool. If there is none, start it, or raise `PoolFailed` if this use is a guest."""
        try:
            folder = private_directory(self.spec.directory)
        except ConfigurationError as error:
            raise PoolFailed(str(error.mistakes[0])) from None
        path = self._path = folder / f"{self.spec.key}.sock"
        found = _connected(path)
        if found is not None:
            return found
        if self.is_guest:
            return self._search(folder)
        try:
            with locked(folder / f"{self.spec.key}.lock"):
                found = _connected(path)
                if found is None:
                    _start_process(path, folder, self.spec.key)
                    found = _connected(path)
        except OSError as error:
            remove_left(folder)
            raise PoolFailed(f"no process can be started ({error.strerror or error}; {folder})") from None
        if found is None:
            raise PoolFailed("the process of the pool cannot be reached")
        return found


def _connected(path: Path) -> socket.socket | None:
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(str(path))
        # The spec that it is sent may hold secrets.
        if is_own_user(channel):
            return channel
    except OSError:
        pass
    channel.close()
    return None


def _pool_pid(path: Path) -> int | None:
    """Return the number of the process that runs the pool at a socket; None if it cannot be told.

    The socket tells that of the process which has started the pool.
    """
    wanted = {_PROGRAM, str(path.parent), path.stem}
    return next((pid for pid in own_processes() if wanted <= set(command_line(pid))), None)


def _described(path: Path) -> Mapping[str, Any] | None:
    """Return what a pool says of itself (`describe`): nothing if it answers nothing, and None if none runs there."""
    channel = _connected(path)
    if channel is None:
        return None
    with channel, suppress(TimeoutError, ValueError):
        channel.settimeout(_DESCRIBED_WITHIN_S)
        try:
            channel.sendall(b'{}\n{"describe": true}\n')
            with channel.makefile("rb") as lines:
                found: Mapping[str, Any] | None = orjson.loads(lines.readline()) or None
                return found
        except ConnectionError:
            return None
    return {}


_not_for_children: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets that a forked child would keep listening when the pool has ended: others would wait for its answer."""


def _close_listening() -> None:
    for listening in list(_not_for_children):
        listening.close()


os.register_at_fork(after_in_child=_close_listening)


def _start_process(path: Path, folder: Path, key: str) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        _not_for_children.add(listening)
        listening.bind(str(path))
        listening.listen(BACKLOG)
        with (folder / f"{key}.log").open("wb") as log:
            starter = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(listening.fileno()), str(folder), key, json.dumps(sys.path)],
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        starter.wait()
