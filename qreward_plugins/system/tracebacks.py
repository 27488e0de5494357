"""Describes and classifies exceptions of a user's function, in this process and in workers."""

from __future__ import annotations

import os
import traceback

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The folder of this package."""


def describe(error: BaseException) -> str:
    """Return its type, its message, and the line that raised it."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be read)"
    # The last line of the user's code: frames of this package and of the import system are skipped.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OURS) and not frame.filename.startswith("<frozen ")
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}"


def is_transient(error: BaseException) -> bool:
    """Whether another try may help: the error is a time-out or a lost connection."""
    # Compared by name: until Python 3.11, asyncio and concurrent.futures have a TimeoutError of their own.
    return isinstance(error, ConnectionError) or any(kind.__name__ == "TimeoutError" for kind in type(error).__mro__)
