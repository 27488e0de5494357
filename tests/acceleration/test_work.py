"""What a call costs, counted in function calls, which do not depend on the machine's load."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from qreward_plugins import accelerate

CALLS = 200
MOST_SINGLE = 135
"""Most Python functions that a single call may enter, those of asyncio included. 126 on Python 3.11."""
MOST_IN_BATCH = 106
"""The same of a call in a batch: 96."""


async def _returned(x: int) -> int:
    return x


def _functions_entered(work: Callable[[Any], Awaitable[None]]) -> float:
    """Python functions that are entered for each of `CALLS` calls."""
    entered = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal entered
        entered += event == "call"

    async def main() -> None:
        function = accelerate(_returned, rate=100_000, retries=3, concurrency=32, seed=1)
        await work(function)  # imports and caches
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            await work(function)
        finally:
            sys.setprofile(before)

    asyncio.run(main())
    return entered / CALLS


async def _one_by_one(function: Any) -> None:
    for number in range(CALLS):
        await function(number)


def test_a_call_does_little_work() -> None:
    assert _functions_entered(_one_by_one) < MOST_SINGLE
    assert _functions_entered(lambda function: function.map(range(CALLS))) < MOST_IN_BATCH
