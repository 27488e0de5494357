"""The virtual-time loop: instant, exact, and honest about hangs."""

from __future__ import annotations

import asyncio
import socket

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


def test_sockets_are_heard_before_time_moves_on():
    async def main():
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            heard = []
            loop.add_reader(ours, lambda: heard.append((loop.time(), ours.recv(1))))
            loop.call_later(1, theirs.send, b"x")
            await asyncio.sleep(2)
            loop.remove_reader(ours)
        return heard

    assert run(main()) == [(1.0, b"x")]


def test_calls_from_threads_arrive_among_timers():
    async def main():
        loop = asyncio.get_running_loop()
        called = []
        for seconds in range(300):
            loop.call_later(seconds, loop.call_soon_threadsafe, called.append, seconds)
        await asyncio.sleep(300)
        return called

    assert run(main()) == list(range(300))


def test_a_timer_that_runs_a_hair_early_does_not_stop_the_time():
    async def main():
        loop = asyncio.get_running_loop()
        due, done = 1.0 + 1e-13, asyncio.Event()

        def look(tries: int = 0) -> None:
            assert tries < 10
            if loop.time() < due:
                loop.call_at(due, look, tries + 1)
            else:
                done.set()

        loop.call_at(1.0, lambda: None)
        loop.call_at(due, look)
        await done.wait()

    run(main())
