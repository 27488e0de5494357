"""Checks before long work that the file of its result can be written, so that nothing is lost at the end."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import InputError


def check_writable(path: Path) -> None:
    """Raise `InputError` if no file can be written at `path`. A file that is there may be replaced."""
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"{path}: there is no directory {str(folder)!r}")
    if path.is_dir():
        raise InputError(f"{path}: is a directory; name a file")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: the directory {str(folder)!r} cannot be written; name a file elsewhere")


def check_new(path: Path, ending: str, *, overwrite: bool) -> None:
    """Raise `InputError` if no file can be written at `path`, if its name has another ending, or if there is a file and
    `overwrite` is false.
    """
    if path.suffix != ending:
        raise InputError(f"{path}: the name must end in {ending}")
    check_writable(path)
    if path.exists() and not overwrite:
        raise InputError(f"{path}: exists; name another file, or replace it with --overwrite")
