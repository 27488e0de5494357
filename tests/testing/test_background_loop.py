"""The one loop of all fake trainers: started when needed, and nothing of it is left when it is closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from qreward_plugins.testing.fake_trainer import BackgroundLoop

NAME = "background-loop-of-a-test"


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop(NAME, "FakeTrainer")
    yield loop
    loop.close()
    assert not threads()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_it_starts_when_first_needed_and_stays_the_same(loop) -> None:
    assert not threads()

    async def here() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert loop.run(here()) is loop.run(here()) is loop.loop
    assert len(threads()) == 1


def test_the_message_of_a_time_out_counts_what_was_waited_for(loop) -> None:
    waiting: list[str] = []
    started = threading.Event()

    async def never() -> None:
        waiting.append("a reward")
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            waiting.clear()

    def why() -> str:
        started.wait()
        return f"waits for {waiting}"

    with pytest.raises(TimeoutError, match=r"waits for \['a reward'\]"):
        loop.run(never(), 0.01, why)


def test_closing_cancels_what_another_thread_waits_for(loop) -> None:
    started = threading.Event()
    raised: list[BaseException] = []

    async def never() -> None:
        started.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            loop.run(never())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    loop.close()
    thread.join()
    assert [type(error).__name__ for error in raised] == ["CancelledError"]


def test_a_closed_loop_says_whose_it_was(loop) -> None:
    async def nothing() -> None: ...

    loop.close()
    loop.close()
    with pytest.raises(RuntimeError, match="this FakeTrainer is closed"):
        loop.run(nothing())
    with pytest.raises(RuntimeError, match="this FakeTrainer is closed"):
        _ = loop.loop
