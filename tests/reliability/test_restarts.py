"""Servers that go away in the middle of a batch and come back: one, the other, both at once, and both for a blink."""

from __future__ import annotations

import asyncio

from qreward_plugins import RewardEngine, Scored
from qreward_plugins.testing import JudgeServer, Latency, ServerLimits

from ..kit import connections_left, overlap_of, tasks_left

SAMPLES = 2_000
CONCURRENCY = 16


class Progress:
    """Counts outcomes, so that what is done to the servers depends on the batch and not on the clock."""

    def __init__(self, samples):
        self._came = [asyncio.Event() for _ in range(samples)]
        self.count = 0

    def one_more(self, _):
        self._came[self.count].set()
        self.count += 1

    async def reaches(self, count):
        await self._came[count - 1].wait()


async def disturb(a, b, progress, engine):
    async def down(*servers):
        for server in servers:
            await asyncio.to_thread(server.stop)

    async def up(*servers):
        for server in servers:
            await asyncio.to_thread(server.start)

    await progress.reaches(200)
    await down(a)
    await progress.reaches(500)
    await up(a)
    await down(b)
    await progress.reaches(700)
    await up(b)
    await progress.reaches(1000)
    await down(a, b)
    while {source.state for source in engine.statistics().sources.values()} != {"down"}:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await up(a, b)
    await progress.reaches(1500)
    await down(a, b)
    await up(a, b)


def test_servers_that_stop_and_start_again_cost_no_sample_its_score(make_config, make_sample):
    samples = [make_sample(number) for number in range(SAMPLES)]

    async def score(a, b):
        tree = make_config(
            {"a": a.base_url, "b": b.base_url}, limits={name: {"concurrency": CONCURRENCY} for name in "ab"}
        )
        progress = Progress(SAMPLES)
        async with RewardEngine(tree) as engine:
            disturbing = asyncio.ensure_future(disturb(a, b, progress, engine))
            calls = [asyncio.ensure_future(engine.score(sample)) for sample in samples]
            for call in calls:
                call.add_done_callback(progress.one_more)
            outcomes = await asyncio.gather(*calls)
            await disturbing
            statistics = engine.statistics()
        assert tasks_left() == []
        return outcomes, statistics

    a, b = (
        JudgeServer(limits=ServerLimits(concurrency=CONCURRENCY), latency=Latency(median_s=0.01, sigma=0.6), seed=seed)
        for seed in range(2)
    )
    with a, b:
        outcomes, statistics = asyncio.run(score(a, b))
        reports = {"a": a.report(), "b": b.report()}
    assert connections_left(a.base_url, b.base_url) == []
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert [outcome.reward for outcome in outcomes] == [overlap_of(sample) for sample in samples]
    assert (statistics.waiting, statistics.failed_total) == (0, 0)
    for name, report in reports.items():
        source = statistics.sources[name]
        assert source.transient > 5  # cut off, and refused while the server was down
        assert source.in_flight == source.timeouts == source.permanent == report.violations_total == 0
        assert source.answered + source.transient + source.cancelled == source.requests
        assert report.answered + report.abandoned == report.requests <= source.requests
