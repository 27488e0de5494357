"""A stream of any length holds a bounded number of samples, and lets go of each without the garbage collector's help.

In virtual time, because samples that fail wait before they are tried again.
"""

from __future__ import annotations

import asyncio
import gc

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.errors import TransientError
from qreward_plugins.samples.spent import Usage
from qreward_plugins.simulation import run
from qreward_plugins.sources import Reply

SAMPLES = 6_000
WINDOW = 64


class Column:
    """A part of a sample that counts how many of it are alive."""

    alive = 0

    def __init__(self):
        Column.alive += 1

    def __del__(self):
        Column.alive -= 1


class Answering:
    """A source without sockets; every seventh request fails, every eleventh gets an invalid verdict."""

    name, model, slots = "a", "judge", None

    def __init__(self):
        self.requests = 0

    async def send(self, request, *, on_sent):
        on_sent()
        self.requests += 1
        await asyncio.sleep(0)
        if self.requests % 7 == 0:
            raise TransientError("failed")
        score = "null" if self.requests % 11 == 0 else "0.5"
        return Reply(text=f'{{"id": "{request.nonce}", "score": {score}}}', usage=Usage(10, 10))

    async def aclose(self):
        pass


def test_a_stream_holds_no_more_than_its_window(make_config):
    source = Answering()

    def samples():
        for number in range(SAMPLES):
            yield Sample(
                [{"role": "user", "content": "?"}], f"It is {number}.", extras={"column": Column()}, id=str(number)
            )

    async def score():
        most, failed = 0, 0
        async with RewardEngine(
            make_config({"a": "http://localhost"}, judge={"invalid_retries": 1}), sources={"a": source}
        ) as engine:
            seen = 0
            async for sample, outcome in engine.score_stream(samples(), window=WINDOW):
                assert sample.id == str(seen)
                seen += 1
                failed += not isinstance(outcome, Scored)
                most = max(most, Column.alive)
        del sample, outcome
        return seen, most, failed

    gc.collect()
    gc.disable()
    try:
        seen, most, failed = run(score())
        assert Column.alive == 0
    finally:
        gc.enable()
    assert (seen, failed > 0) == (SAMPLES, True)
    # One is with the reader, one between the two, and some that ended are still on the list of attempts to look at,
    # which is cleared when most of it has ended.
    assert WINDOW <= most <= 2 * WINDOW + 2
