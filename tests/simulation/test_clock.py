"""The virtual-time loop: instant, exact, and honest about hangs."""

from __future__ import annotations

import asyncio
import socket

import pytest

from qreward_plugins.simulation import Deadlock, run


def test_time_jumps_from_timer_to_timer_that_is_not_cancelled():
    async def main():
        loop, seen = asyncio.get_running_loop(), []
        for seconds in range(500):
            loop.call_later(seconds, lambda: None).cancel()
        for seconds in (3600, 1, 60):
            loop.call_later(seconds, lambda seconds=seconds: seen.append((seconds, loop.time())))
        await asyncio.sleep(3600.5)
        return seen

    assert run(main()) == [(1, 1.0), (60, 60.0), (3600, 3600.0)]


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
