"""The directory in which the processes of one user on one machine find the keeper of their limits.

Every process of the user must come to the same directory, and nobody else may write to it. The default is
/tmp/qreward-UID, whatever else the environment of a process says: schedulers set another TMPDIR for each job, and
XDG_RUNTIME_DIR is set in a login shell, but not in a worker of Ray, a service or a cron job of the same user, and the
system removes it when the user logs out, while a training goes on.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigurationError, Mistake
from .machine_keeper import SOCKET

LONGEST_SOCKET_PATH = 107 if sys.platform == "linux" else 103
"""Most bytes of a socket's path: the system has room for one more, the zero at its end."""
USUAL = "/tmp/qreward-{uid}"
"""The default."""
VARIABLE = "QREWARD_SHARED_DIRECTORY"
"""The environment variable with another directory."""


def private_directory() -> Path:
    """Return the directory, made if it does not exist.

    Raises `ConfigurationError` if sockets in it would have too long a path, or if it cannot be made, is no directory,
    belongs to another user, or is open to others. What another user has put in its place is refused, and left alone.
    """
    path = Path(os.environ.get(VARIABLE) or USUAL.format(uid=os.getuid())).expanduser().absolute()
    if len(os.fsencode(path / SOCKET)) > LONGEST_SOCKET_PATH:
        most = LONGEST_SOCKET_PATH - len(f"/{SOCKET}")
        raise _refused(f"{path} is too long for a socket in it.", f"Name one whose path has at most {most} bytes.")
    try:
        # makedirs gives the mode to the last directory only.
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise _refused(f"{path} cannot be made ({error.strerror}).", "Name one that this user may make.") from None
    if found.st_uid != os.getuid():
        problem = f"{path} belongs to another user (uid {found.st_uid}; this process has uid {os.getuid()})."
        raise _refused(problem, "Processes of one user share nothing with others. Name a directory of this user.")
    if not stat.S_ISDIR(found.st_mode):
        raise _refused(f"{path} is no directory (a link is not followed).", "Name another one, or remove it.")
    if found.st_mode & 0o077:
        problem = f"{path} is not private: other users may enter it (mode {stat.S_IMODE(found.st_mode):o})."
        raise _refused(problem, f"Run: chmod 700 {path}")
    return path


def _refused(problem: str, remedy: str) -> ConfigurationError:
    return ConfigurationError([Mistake(VARIABLE, problem, remedy)])
