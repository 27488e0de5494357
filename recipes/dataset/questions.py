"""Questions and answers as tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import DataError
from .formats import Task

_MARK = "####"
_SHOWN_PROBLEMS = 5


def tasks_from(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    question: str,
    answer: str,
    name: str,
    instruction: str,
    skip_bad: bool = False,
) -> tuple[list[Task], int]:
    """Read questions and answers. Returns the tasks, and the number of rows that `skip_bad` left out.

    Raises `DataError` that names the bad rows; with `skip_bad`, only if no row is left.
    """
    found, bad = [], []
    for number, row in enumerate(rows, 1):
        try:
            text, answered = (_column(row, column) for column in (question, answer))
            solution, mark, last = answered.rpartition(_MARK)
            reference = last.strip() if mark else answered
            if not reference:
                raise ValueError(f"nothing comes after {_MARK} in {answer}")
        except ValueError as error:
            bad.append(f"{path}, row {number}: {error}")
            continue
        prompt = f"{text}\n\n{instruction}" if instruction else text
        found.append(Task(({"role": "user", "content": prompt},), reference, name, solution.strip()))
    if not rows:
        raise DataError(f"{path}: has no rows")
    if bad and not (skip_bad and found):
        more = [f"{len(bad) - _SHOWN_PROBLEMS:,} more of {len(rows):,} rows"] if len(bad) > _SHOWN_PROBLEMS else []
        remedy = "correct them, or leave such rows out with --skip-bad" if found else "no row can be used"
        raise DataError("\n".join([*bad[:_SHOWN_PROBLEMS], *more, remedy]))
    return found, len(bad)


def _column(row: Mapping[str, Any], column: str) -> str:
    """The text in a column of a row. Raises ValueError."""
    if column not in row:
        raise ValueError(
            f"there is no column {column!r}, only {', '.join(map(str, row))}; name yours with --question and --answer"
        )
    value = row[column]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"{column} is empty")
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not isinstance(value, str) and not number:
        raise ValueError(f"{column} must be a text or a number, and is {value!r:.40} ({type(value).__name__})")
    text = str(value).strip()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{column} has a broken character (half of a surrogate pair)") from None
    return text
