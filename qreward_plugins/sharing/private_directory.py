"""The directory in which processes of one user on one machine find the keeper of their limits.

Every process of the user must come to the same directory, and nobody else may write to it. The default is
/tmp/qreward-UID, whatever the environment of a process says: schedulers set another TMPDIR for each job, and
XDG_RUNTIME_DIR is not set everywhere and is removed when the user logs out, while a training goes on.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from pathlib import Path

from ..errors import ConfigurationError, Mistake

LONGEST_SOCKET_PATH = 107 if sys.platform == "linux" else 103
"""Most bytes of a socket's path."""
_LONGEST_FILE_NAME = len("keeper.9999999999.sock")
_KEY = "engine.shared_directory"


def private_directory(configured: str | None) -> Path:
    """Return the directory, made if it does not exist. Raises `ConfigurationError` if it cannot be used."""
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "fork"):
        problem = "needs Unix domain sockets, which this system does not have."
        raise ConfigurationError([Mistake("engine.shared", problem, "Use `local`, or `server`.")])
    path = Path(configured).expanduser() if configured is not None else _default()
    if not path.is_absolute():
        path = Path.cwd() / path
    length = len(os.fsencode(path)) + 1 + _LONGEST_FILE_NAME
    if length > LONGEST_SOCKET_PATH:
        problem = f"{path} is too long: a socket in it would have a path of {length} bytes, and a system takes "
        problem += f"{LONGEST_SOCKET_PATH}."
        raise ConfigurationError([Mistake(_KEY, problem, "Name a shorter directory.")])
    try:
        # makedirs gives the mode to the last directory only.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        problem = f"{path} cannot be made ({error.strerror})."
        raise ConfigurationError([Mistake(_KEY, problem, "Name a directory that this user may make.")]) from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigurationError([Mistake(_KEY, f"{path} is no directory.", "Name another one, or remove it.")])
    if found.st_uid != os.getuid():
        problem = f"{path} belongs to another user (uid {found.st_uid}; this process has uid {os.getuid()})."
        remedy = "Only processes of one user share limits in it. Name a directory of this user."
        raise ConfigurationError([Mistake(_KEY, problem, remedy)])
    if found.st_mode & 0o077:
        problem = f"{path} is not private: other users may enter it (mode {stat.S_IMODE(found.st_mode):o})."
        raise ConfigurationError([Mistake(_KEY, problem, f"Run: chmod 700 {path}")])
    return path


def is_own_user(peer: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user. Where the system cannot tell, the mode of the
    directory has kept others out.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


def _default() -> Path:
    return Path("/tmp", f"qreward-{os.getuid()}")
