"""What to make of an exception that a user's function raised, in whichever process it did."""

from __future__ import annotations

import os
import traceback

_OURS = os.path.dirname(__file__)


def describe(error: BaseException) -> str:
    """Say what it is: its type, its message, and the line that raised it."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    # The user's own line: neither ours, which called the function, nor the import system's.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.dirname(frame.filename) != _OURS and not frame.filename.startswith("<frozen ")
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}"


def is_transient(error: BaseException) -> bool:
    """Say whether another try may help: a time-out or a lost connection, as of a function that asks a service."""
    # By name, because there are several of that name: asyncio and concurrent.futures had their own until Python 3.11.
    return isinstance(error, ConnectionError) or any(kind.__name__ == "TimeoutError" for kind in type(error).__mro__)
