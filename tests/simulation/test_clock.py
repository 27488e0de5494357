"""The virtual-time loop: instant, exact, and honest about hangs."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins.simulation import Deadlock, run


def test_time_jumps_from_timer_to_timer():
    async def main():
        loop = asyncio.get_running_loop()
        seen = []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            seen.append((seconds, loop.time()))

        await asyncio.gather(*(sleeper(seconds) for seconds in (3600, 1, 60)))
        return seen

    assert run(main()) == [(1, 1.0), (60, 60.0), (3600, 3600.0)]


def test_cancelled_timers_do_not_move_time():
    async def main():
        loop = asyncio.get_running_loop()
        for seconds in range(500):
            loop.call_later(seconds, lambda: None).cancel()
        await asyncio.sleep(7)
        return loop.time()

    assert run(main()) == 7.0


def test_a_hang_is_an_error_at_once():
    with pytest.raises(Deadlock):
        run(asyncio.Event().wait())
