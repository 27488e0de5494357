"""Plans of sources that take several samples in a request."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import InputError, RewardEngine, Sample
from qreward_plugins.cli.plan import _source_table
from qreward_plugins.config import load_config
from qreward_plugins.planning import Assumptions, RequestTime, parse_latency
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply

TIME = RequestTime(0.02, 0.001)
QUESTION = [{"role": "user", "content": "?"}]


def tree(batch=None, **limits):
    source = {"kind": "http", "url": "http://planned.invalid/score", "limits": limits or {"concurrency": 4}}
    return {"sources": {"rm": source | ({"batch": batch} if batch else {})}, "judges": {"j": {"kind": "function"}}}


class Model:
    """A reward model that takes exactly `TIME`."""

    name, model, slots, local = "rm", "timed", None, False

    def __init__(self, batch):
        self.batch = batch

    async def send(self, request, *, on_sent):
        return (await self.send_batch([request], on_sent=on_sent))[0]

    async def send_batch(self, requests, *, on_sent):
        on_sent()
        await asyncio.sleep(TIME.fixed_s + TIME.call_s * len(requests))
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
    found = exact_plan(config, 1024, latency_s={"rm": TIME})
    assert found.step_s.p50 == pytest.approx(measured_s(config, 1024), rel=0.1)
    (use,) = found.sources
    assert use.calls_per_request == pytest.approx(size, rel=0.1)
    assert use.requests == pytest.approx(1024 / size, rel=0.1)
    assert use.peak_in_flight == places
    assert found.attempts == 1.0
    assert use.latency_s == pytest.approx(0.021)
    assert "0.02 s plus 0.001 s for each of its calls at rm (as given)" in " ".join(found.notes)
    assert "calls each" in [column.header for column in _source_table(found).columns]


def test_a_plan_with_batches_is_shorter(exact_plan):
    alone = exact_plan(tree(), 512, latency_s={"rm": TIME})
    together = exact_plan(tree({"max_size": 32}), 512, latency_s={"rm": TIME})
    assert alone.step_s.p50 == pytest.approx(measured_s(tree(), 512), rel=0.1)
    assert together.step_s.p50 < 0.2 * alone.step_s.p50
    assert alone.sources[0].calls_per_request == 1.0
    assert "calls each" not in [column.header for column in _source_table(alone).columns]


def test_a_request_counts_once_against_requests_per_minute(exact_plan):
    config = tree({"max_size": 32}, requests_per_minute=10, concurrency=4)
    found = exact_plan(config, 320, latency_s={"rm": TIME})
    assert found.sources[0].requests_used <= 1.0
    assert found.step_s.p50 < 61


def test_the_advice_says_what_batches_would_save(exact_plan):
    found = exact_plan(tree(), 512, latency_s={"rm": TIME}, advise=True)
    by_change = {advice.change: advice for advice in found.advice}
    told = by_change["batch: {max_size: 32} on rm, which must take lists"]
    together = exact_plan(tree({"max_size": 32}), 512, latency_s={"rm": TIME})
    assert told.step_s == pytest.approx(together.step_s.p50, rel=0.02)


@pytest.mark.parametrize(
    ("config", "latency"),
    [
        (tree(), 0.021),  # what a request takes once is not known
        (tree({"max_size": 8}), TIME),  # it does already
        (tree(concurrency=1024), TIME),  # nothing waits
    ],
)
def test_batches_are_advised_only_where_they_are_known_to_help(exact_plan, config, latency):
    found = exact_plan(config, 128, latency_s={"rm": latency}, advise=True)
    assert not any("batch" in advice.change for advice in found.advice)


def test_the_time_of_a_request_is_read():
    config = load_config(tree())
    assert parse_latency("rm=0.02+0.001", config) == {"rm": TIME}
    assert parse_latency("0.02+1e-3", config) == {"*": TIME}
    assert parse_latency("rm=1e+2", config) == {"rm": 100.0}
    for wrong in ("rm=0.02+", "rm=+x", "rm=1+2+3"):
        with pytest.raises(InputError, match="no number of seconds"):
            parse_latency(wrong, config)
    for bad in (RequestTime(-1, 2), RequestTime(0, 0), RequestTime(float("nan"), 1)):
        with pytest.raises(InputError, match=r"from 0\.001 to 3600"):
            Assumptions(latency_s={"rm": bad})
