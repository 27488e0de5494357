"""What a failed call of an accelerated function raises: its exception, with notes on what was tried before."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from ..secrets import described_error
from ..sources import threads

_HERE = os.path.dirname(__file__)


class Raised:
    """The result of a call that failed: its exception.

    `refused`: the function was not called, because it is closed, or cannot be called like this. That has no default.
    """

    __slots__ = ("error", "refused")

    def __init__(self, error: BaseException, *, refused: bool = False) -> None:
        self.error = error
        self.refused = refused


PREFIX = "accelerate: "
"""How our notes begin. A function may raise the same exception object again and again; older notes are replaced."""
MOST_SHOWN = 5


def note_attempts(error: BaseException, before: Sequence[BaseException], seconds: float) -> None:
    """Note how many attempts failed before this error, in how many seconds, and with what."""
    if not before:
        return
    shown = [described_error(each) for each in before[:MOST_SHOWN]]
    if len(before) > MOST_SHOWN:
        shown.append(f"and {len(before) - MOST_SHOWN} more")
    tried = f"{len(before) + 1} attempts failed in {seconds:.3g} s; before this one: {'; '.join(shown)}"
    add_note(error, f"{PREFIX}{tried}")


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, instead of an earlier one of ours. Before Python 3.11, tracebacks do not show it."""
    others = [each for each in getattr(error, "__notes__", ()) if not str(each).startswith(PREFIX)]
    with suppress(Exception):  # an exception class may refuse attributes
        error.__notes__ = [*others, note]  # type: ignore[attr-defined]


def cut_traceback(error: BaseException) -> None:
    """Let the traceback begin in the function. Our frames refer to the call, which refers to the error."""
    traceback = error.__traceback__
    while traceback is not None and _is_ours(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    error.__traceback__ = traceback


def _is_ours(file: str) -> bool:
    return os.path.dirname(file) == _HERE or file == threads.__file__
