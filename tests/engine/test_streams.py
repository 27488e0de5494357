"""Streams: an outcome is given out as soon as it is there, whatever the producer of the samples waits for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import CancelledError
from contextlib import aclosing

import pytest

from qreward_plugins import EngineError, RewardEngine, Sample, load_config, process_portal
from qreward_plugins.engine.process_portals import close_process_portals
from qreward_plugins.simulation import SimulatedSource, run
from qreward_plugins.testing import JudgeServer

from ..kit import make_config, make_sample


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


# The portal: one engine for threads and event loops that come and go


@pytest.fixture
def judge():
    with JudgeServer(lambda call: 0.25) as server:
        yield server


@pytest.fixture
def portal(judge):
    with RewardEngine(make_config({"a": judge})).portal() as portal:
        yield portal


def test_futures_give_outcomes(portal):
    assert portal.submit(make_sample()).result().reward == 0.025
    outcomes = portal.submit_all([make_sample(1), make_sample(2)]).result()
    assert [outcome.reward for outcome in outcomes] == [0.025, 0.025]
    assert portal.statistics().scored == 3


def test_cancelling_a_future_cancels_its_attempts(portal, judge):
    judge.hold()
    one, many = portal.submit(make_sample()), portal.submit_all([make_sample(1), make_sample(2)])
    judge.wait_for(lambda report: report.in_flight == 3)
    one.cancel()
    many.cancel()
    assert judge.wait_for(lambda report: report.in_flight == 0).abandoned == 3
    judge.release()
    for future in (one, many):
        with pytest.raises(CancelledError):
            future.result()


FORKED = """
import os, signal
from qreward_plugins import EngineError, Sample, load_config, process_portal

def one(sample):
    return 1.0

function = {"kind": "function", "function": "__main__:one", "mode": "thread", "arguments": "sample"}
config = load_config({"sources": {"f": function}, "judges": {"j": {"kind": "function"}}})
sample = Sample([{"role": "user", "content": "?"}], "x")
portal = process_portal(config)
print(portal.score(sample).reward, flush=True)
if os.fork() == 0:
    signal.alarm(40)
    try:
        portal.score(sample)
    except EngineError as error:
        assert "before a fork" in str(error)
    print(process_portal(config).score(sample).reward, flush=True)
else:
    os.wait()
"""


def test_a_portal_of_before_a_fork_says_so_and_the_child_gets_its_own():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["1.0", "1.0"], done.stderr


def test_a_process_has_one_portal_for_equal_configurations(judge):
    config = load_config(make_config({"a": judge}))
    try:
        portal = process_portal(config)
        assert process_portal(load_config(make_config({"a": judge}))) is portal
        assert process_portal(load_config(make_config({"a": judge}, engine={"deadline_s": 9}))) is not portal
        assert portal.config == config
        assert portal.score(make_sample()).reward == 0.025
    finally:
        close_process_portals()
    close_process_portals()
    with pytest.raises(EngineError, match="this portal is closed"):
        portal.score(make_sample())
    try:
        assert process_portal(config).score(make_sample()).reward == 0.025
    finally:
        close_process_portals()
