"""The headers with which a caller sets deadline and priority of a request, for every path of the server and for
transports.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ...config.nodes import MOST_PRIORITY, PRIORITIES
from ...errors import InputError

DEADLINE_HEADER = "X-QReward-Deadline-S"
"""Seconds that a request may take, waiting included. Default: `engine.deadline_s`."""
PRIORITY_HEADER = "X-QReward-Priority"
"""Priority of a request: `high`, `normal`, `low`, or a whole number; higher goes first. Default: that of the
configuration for samples, `normal` for calls of clients."""
_WHOLE = re.compile(r"[+-]?[0-9]{1,12}")


def read_terms(headers: Mapping[str, str]) -> tuple[float | None, int | None]:
    """Return the deadline in seconds and the priority; None for a header that is not there. Names of `headers` are in
    any case. Raises `InputError`.
    """
    values = {name.lower(): value for name, value in headers.items()}
    deadline, priority = values.get(DEADLINE_HEADER.lower()), values.get(PRIORITY_HEADER.lower())
    return (
        None if deadline is None else _seconds(deadline),
        None if priority is None else read_priority(priority.strip().lower(), PRIORITY_HEADER),
    )


def read_priority(value: Any, what: str) -> int:
    """Return a priority: a name, a whole number, or its text. Raises `InputError`."""
    if isinstance(value, str):
        value = PRIORITIES.get(value) if value in PRIORITIES else int(value) if _WHOLE.fullmatch(value) else None
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MOST_PRIORITY:
        raise InputError(f"{what} must be a whole number, or high, normal or low")
    return value


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InputError(f"{DEADLINE_HEADER} must be a number of seconds above 0")
    return seconds
