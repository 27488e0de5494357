"""The private folder of a user on a machine, in which processes find the pools that run already."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_LONGEST_SOCKET_PATH = 107
"""Most bytes of the path of a socket; the folder is used on Linux alone."""
_LONGEST_NAME = len("/0123456789abcdef.sock")


class NoRuntimeFolder(Exception):
    """There is no folder that only this user can write to. The message says why."""


def runtime_folder() -> Path:
    """Return the folder, and make it if there is none: `qreward` in `XDG_RUNTIME_DIR`, or `qreward-UID` in the folder
    for temporary files. Raises `NoRuntimeFolder`.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    private = os.path.isabs(base) and os.path.isdir(base) and os.access(base, os.W_OK)
    folder = Path(base, "qreward")
    if not private or not _fits(folder):
        folder = Path(tempfile.gettempdir(), f"qreward-{os.getuid()}")
    if not _fits(folder):
        raise NoRuntimeFolder(f"{folder} is too long for the path of a socket; set XDG_RUNTIME_DIR to a shorter folder")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        raise NoRuntimeFolder(f"{folder} cannot be made ({error.strerror})") from None
    # Another user could have made it, to hand servers of their own to this one.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise NoRuntimeFolder(f"{folder} belongs to somebody else; remove it, or set XDG_RUNTIME_DIR")
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(folder, 0o700)
    return folder


def _fits(folder: Path) -> bool:
    """Whether the path of a socket in `folder` is short enough for the system."""
    return len(os.fsencode(folder)) + _LONGEST_NAME <= _LONGEST_SOCKET_PATH
