"""The order of a batch that needs several windows: which jobs each window should serve.

A slot of a sliding window that is used s seconds into one window is free again s seconds into the next. If a batch
overflows its last full window by a few jobs, these can start when the first slots of that window are free again. That
is early if the first jobs of every window are short. So each window begins with as many short jobs as overflow at the
end, and continues with the longest that are left. The shortest of all come last. Within each part the longest goes
first. If one window suffices, or speeds differ, longest first is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .jobs import Job

MOST_SHORT = 0.9
"""Largest share of a batch that counts as short jobs."""


def windows_order(jobs: Sequence[Job], per_window: float) -> list[Job] | None:
    """The best order for `jobs` if `per_window` of them can go in a window; None if that is longest first."""
    count = len(jobs)
    windows = math.floor((count - 1) / per_window) if per_window > 0 else 0
    if windows < 1:
        return None
    overflow = min(math.floor(count - windows * per_window) + 1, int(MOST_SHORT * count / (windows + 1)))
    if overflow < 1:
        return None
    ascending = sorted(jobs, key=lambda job: (job.size, -job.sequence))
    short, long = ascending[: overflow * (windows + 1)], ascending[overflow * (windows + 1) :]
    chunk = len(long) // windows + 1
    order: list[Job] = []
    for window in range(windows):
        end = len(short) - window * overflow
        order += reversed(short[end - overflow : end])
        end = len(long) - window * chunk
        order += reversed(long[max(0, end - chunk) : max(0, end)])
    order += reversed(short[:overflow])
    return order
