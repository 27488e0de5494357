"""A user's reward function that never ends for some responses. Worker processes load this file by its path."""

from __future__ import annotations

import re
import time
from typing import Any

PATH = f"{__file__}:grade_or_hang"


SECONDS = 0.02
"""What any other response takes: the rest of a batch is still waiting while one hangs."""


def hangs(item: int, draft: int) -> bool:
    """One response in 48, so that about 2 % of them hang."""
    return item % 12 == 5 and draft == 1


def grade_or_hang(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The quality that the response says, as the judges of these scenarios give it (judges.py)."""
    found = re.search(r"item (\d+) draft (\d+) quality (\d+)", solution_str)
    assert found is not None, f"not a response of these scenarios: {solution_str!r}"
    item, draft, quality = map(int, found.groups())
    while hangs(item, draft):
        time.sleep(3600)
    time.sleep(SECONDS)
    return quality / 10
