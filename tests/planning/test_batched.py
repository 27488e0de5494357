"""Plans of sources that take several samples in a request."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.cli.plan import _source_table
from qreward_plugins.config import load_config
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply

CALL_S = 0.04
"""Seconds of a request of one call. Half of it is assumed to be the same for any number of calls."""
QUESTION = [{"role": "user", "content": "?"}]


def tree(batch=None, **limits):
    source = {"kind": "http", "url": "http://planned.invalid/score", "limits": limits or {"concurrency": 4}}
    return {"sources": {"rm": source | ({"batch": batch} if batch else {})}, "judges": {"j": {"kind": "function"}}}


class Model:
    """A reward model whose requests take what a plan assumes."""

    name, model, slots, local = "rm", "timed", None, False

    def __init__(self, batch):
        self.batch = batch

    async def send(self, request, *, on_sent):
        return (await self.send_batch([request], on_sent=on_sent))[0]

    async def send_batch(self, requests, *, on_sent):
        on_sent()
        await asyncio.sleep(CALL_S * (0.5 + 0.5 * len(requests)))
        return [Reply(value=0.5) for _ in requests]

    async def aclose(self):
        pass


def measured_s(config, count):
    async def main():
        source = Model(load_config(config).sources["rm"].batch)
        async with RewardEngine(config, sources={"rm": source}) as engine:
            await engine.score_all([Sample(QUESTION, "warm", id=f"w{n}") for n in range(64)])
            await engine.score_all([Sample(QUESTION, "response", id=str(n)) for n in range(count)])
            return engine.last_batch().makespan_s

    return run(main())


@pytest.mark.parametrize(("places", "size"), [(1, 32), (4, 8)])
def test_a_plan_of_batches_is_that_of_the_step(exact_plan, places, size):
    config = tree({"max_size": size}, concurrency=places)
    found = exact_plan(config, 512, latency_s={"rm": CALL_S})
    assert found.step_s.p50 == pytest.approx(measured_s(config, 512), rel=0.1)
    (use,) = found.sources
    assert use.calls_per_request == pytest.approx(size, rel=0.1)
    assert use.requests == pytest.approx(512 / size, rel=0.1)
    assert use.peak_in_flight == places
    assert found.attempts == 1.0
    assert "calls each" in [column.header for column in _source_table(found).columns]


def test_a_plan_without_batches_has_one_call_in_each_request(exact_plan):
    found = exact_plan(tree(), 256, latency_s={"rm": CALL_S})
    assert found.step_s.p50 == pytest.approx(measured_s(tree(), 256), rel=0.1)
    assert found.sources[0].calls_per_request == 1.0
    assert "calls each" not in [column.header for column in _source_table(found).columns]


def test_a_request_counts_once_against_requests_per_minute(exact_plan):
    config = tree({"max_size": 32}, requests_per_minute=10, concurrency=4)
    found = exact_plan(config, 320, latency_s={"rm": CALL_S})
    assert found.sources[0].requests_used <= 1.0
    assert found.step_s.p50 < 61
