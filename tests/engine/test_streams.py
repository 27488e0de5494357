"""Streams: an outcome is given out as soon as it is there, whatever the producer of the samples waits for."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.simulation import SimulatedSource, run


def sample(number=0):
    return Sample([{"role": "user", "content": "?"}], f"answer {number}", id=str(number))


def engine_of(**source):
    node = {"kind": "openai", "base_url": "http://a.invalid/v1", "model": "m"}
    tree = {"sources": {"a": node}, "judges": {"q": {"kind": "llm", "invalid_retries": 0}}, "engine": {"seed": 1}}
    return RewardEngine(tree, sources={"a": SimulatedSource("a", **source)})


def streamed(produce, *, consume=None, window=None, **source):
    """What came of a stream of `produce(given)`, as (id, when); `given` holds what came so far."""

    async def main():
        loop = asyncio.get_running_loop()
        given: list[tuple[str, float]] = []
        async with engine_of(**source) as engine:
            async with aclosing(engine.score_stream(produce(given), window=window)) as stream:
                async for one, _ in stream:
                    given.append((one.id, loop.time()))
                    if consume is not None and not await consume(given):
                        break
            assert engine.statistics().waiting == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return given

    return run(main())


@pytest.mark.parametrize("window", [None, 1, 2, 7])
def test_a_producer_may_wait_for_the_last_outcome(window):
    async def produce(given):
        for number in range(5):
            yield sample(number)
            while len(given) <= number:  # noqa: ASYNC110 - in virtual time
                await asyncio.sleep(0.01)

    given = streamed(produce, window=window)
    assert [name for name, _ in given] == list("01234")


def test_an_outcome_does_not_wait_for_the_next_sample():
    async def produce(given):
        for number in range(3):
            yield sample(number)
            await asyncio.sleep(100)

    given = streamed(produce)
    assert [at for _, at in given] == pytest.approx([1, 101, 201], abs=0.1)


def test_closing_ends_a_producer_that_waits():
    ended = []

    async def produce(given):
        try:
            yield sample()
            await asyncio.sleep(1e6)
        finally:
            ended.append(True)

    async def once(given):
        return False

    streamed(produce, consume=once)
    assert ended == [True]
