"""Notes on the attempts of a failed call, at the exception that its caller gets."""

from __future__ import annotations

from collections.abc import Sequence

from ..secrets import one_line

PREFIX = "accelerate: "
"""How our notes begin. A function may raise the same exception object again and again; older notes are replaced."""
MOST_SHOWN = 5
_CHARS = 200


def note_attempts(error: BaseException, before: Sequence[BaseException], seconds: float) -> None:
    """Note how many attempts failed before this error, in how many seconds, and with what."""
    if not before:
        return
    shown = [f"{type(each).__name__}: {one_line(_text(each), _CHARS)}" for each in before[:MOST_SHOWN]]
    if len(before) > MOST_SHOWN:
        shown.append(f"and {len(before) - MOST_SHOWN} more")
    add_note(error, f"{len(before) + 1} attempts failed in {seconds:.3g} s; before this one: {'; '.join(shown)}")


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, instead of an earlier one of ours. Before Python 3.11, tracebacks do not show it."""
    _set_notes(error, [each for each in _notes(error) if not str(each).startswith(PREFIX)], f"{PREFIX}{note}")


def add_origin(error: BaseException, where: str) -> None:
    """Note where an exception was raised whose traceback was lost on its way from a worker process."""
    _set_notes(error, _notes(error), f"raised in a worker process: {where}")


def _notes(error: BaseException) -> list[object]:
    return list(getattr(error, "__notes__", ()))


def _set_notes(error: BaseException, notes: list[object], note: str) -> None:
    try:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]
    except Exception:  # an exception class may refuse attributes
        return


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be read)"
