"""Cancelling by the thousand, which some HTTP clients answer with connection slots that never come back."""

from __future__ import annotations

import asyncio
import random

from qreward_plugins import RewardEngine, Scored
from qreward_plugins.testing import JudgeServerProcess, Latency, ServerLimits

from ..kit import connections_left, overlap_of, tasks_left

SAMPLES = 4_000
CANCELLED = 1_200
AFTERWARDS = 200
CONCURRENCY = 32


def length_of(sample):
    return len(sample.response) + len(sample.messages[0]["content"])


def test_after_every_third_of_thousands_of_calls_was_cancelled_every_slot_still_works(make_config, make_sample):
    rng = random.Random(11)
    # In the order in which they are served, which is by length: so the first that has not ended is in flight.
    samples = sorted(map(make_sample, range(SAMPLES)), key=length_of, reverse=True)

    async def score(base_url):
        tree = make_config({"a": base_url}, limits={"a": {"concurrency": CONCURRENCY}})
        async with RewardEngine(tree) as engine:
            calls = [asyncio.ensure_future(engine.score(sample)) for sample in samples]
            running = dict.fromkeys(calls)
            victims = set()

            def on_done(call):
                running.pop(call, None)
                # Three for every seven that end by themselves: any of them, or one that is in flight.
                while running and len(victims) < CANCELLED and 7 * len(victims) < 3 * (SAMPLES - len(running)):
                    victim = next(iter(running)) if rng.random() < 0.5 else rng.choice(calls)
                    if running.pop(victim, calls) is None and victim.cancel():
                        victims.add(victim)

            for call in calls:
                call.add_done_callback(on_done)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            in_between = engine.statistics()
            assert (in_between.waiting, in_between.sources["a"].in_flight) == (0, 0)
            again = await engine.score_all(samples[:AFTERWARDS])
            at_the_end = engine.statistics()
        assert tasks_left() == []
        assert await asyncio.to_thread(connections_left, base_url) == []
        return calls, victims, outcomes, again, in_between.sources["a"], at_the_end.sources["a"]

    limits = ServerLimits(concurrency=CONCURRENCY)
    with JudgeServerProcess(limits=limits, latency=Latency(median_s=0.01, sigma=0.6)) as server:
        calls, victims, outcomes, again, in_between, at_the_end = asyncio.run(score(server.base_url))
        report = server.report()

    assert len(victims) == CANCELLED
    for sample, call, outcome in zip(samples, calls, outcomes, strict=True):
        if call in victims:
            assert isinstance(outcome, asyncio.CancelledError)
        else:
            assert isinstance(outcome, Scored)
            assert outcome.reward == overlap_of(sample)
    # Many in the middle of an exchange, and many before it. On a busy machine more of them are still waiting.
    assert CANCELLED / 20 < in_between.cancelled < CANCELLED

    assert [outcome.reward for outcome in again] == [overlap_of(sample) for sample in samples[:AFTERWARDS]]
    assert all(outcome.verdict.attempts == 1 for outcome in again)
    assert at_the_end.timeouts == at_the_end.transient == at_the_end.in_flight == 0
    assert at_the_end.requests - in_between.requests == AFTERWARDS
    assert report.violations_total == report.in_flight == 0
