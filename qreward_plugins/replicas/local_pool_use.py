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
from pathlib import Path
from typing import Any

import orjson

from ..errors import ConfigurationError
from ..private_directory import is_own_user, private_directory
from .group_weights import GroupWeights
from .lock_files import lock
from .pool import PoolFailed
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
        self._sending = threading.Lock()
        # A forked child would keep the connection open, and with it the servers, after this process has ended.
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (method := forget()) is not None and method())

    def follow(self) -> None:
        while not self._is_leaving():
            for attempt in range(_CONNECT_TRIES):
                channel = self._channel = self._connect()
                with channel, suppress(OSError):
                    known = {"weights": self.weights.as_mapping(), "asleep": self.asleep, "starts": not self.finds}
                    channel.sendall(self.spec.to_json() + b"\n" + orjson.dumps(known) + b"\n")
                    self._is_connected = True
                    self._resend()
                    if self._is_leaving():
                        self.leave()
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

    def leave(self) -> None:
        channel = self._channel
        if channel is not None:
            # A guest waits for no end of the servers.
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR if self.finds else socket.SHUT_WR)

    def _forget(self) -> None:
        if self._channel is not None:
            with suppress(OSError):
                os.close(self._channel.detach())

    def _connect(self) -> socket.socket:
        """Connect to the pool. If there is none, start it, or raise `PoolFailed` if this use only finds one."""
        try:
            folder = private_directory(self.spec.directory)
        except ConfigurationError as error:
            raise PoolFailed(str(error.mistakes[0])) from None
        path = folder / f"{self.spec.key}.sock"
        found = _connected(path)
        if found is not None:
            return found
        if self.finds:
            raise PoolFailed(_none_runs(folder, self.spec))
        held = -1
        try:
            held = lock(folder / f"{self.spec.key}.lock")
            found = _connected(path)
            if found is None:
                _start_process(path, folder, self.spec.key)
                found = _connected(path)
        except OSError as error:
            raise PoolFailed(f"no process can be started ({error.strerror or error}; {folder})") from None
        finally:
            if held >= 0:
                os.close(held)
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


def _none_runs(folder: Path, spec: PoolSpec) -> str:
    """Say that no pool of a spec runs, and what differs in one of the same source that does."""
    problem = f"no servers of it run for this user on this machine (the directory is {folder})"
    for path in sorted(folder.glob(f"{_POOL}.sock")):
        digests = _described(path)
        if digests.get("name") == spec.name:
            differs = ", ".join(sorted(name for name, digest in spec.digests.items() if digests.get(name) != digest))
            problem += f"; those of another source {spec.name!r} run, which differs in: {differs}"
            return problem + ". Use the configuration and the environment of the process that started them"
    return problem


def _described(path: Path) -> Mapping[str, Any]:
    """Return the digests of the spec of a pool; empty if it does not answer."""
    channel = _connected(path)
    if channel is None:
        return {}
    with channel, suppress(OSError, ValueError):
        channel.settimeout(_DESCRIBED_WITHIN_S)
        channel.sendall(b'{}\n{"describe": true}\n')
        with channel.makefile("rb") as lines:
            found: Mapping[str, Any] = orjson.loads(lines.readline())
            return found
    return {}


def _start_process(path: Path, folder: Path, key: str) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1024)
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
