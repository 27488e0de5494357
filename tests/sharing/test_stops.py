"""A process that is stopped and goes on: what it was about to write when its share ended meanwhile is not written."""

from __future__ import annotations

import asyncio

from office import Connecting, Office, an_engine, limits, samples, verdict

from qreward_plugins import Scored
from qreward_plugins.sharing.keeper import TTL_S
from qreward_plugins.simulation import run


class Writing(Connecting):
    """A source that connects first, and says that it writes before it does."""

    async def send(self, request, *, on_sent):
        if self.gate is not None:
            await self.gate.wait()
        on_sent()
        return await super().send(request, on_sent=lambda: None)


def test_a_process_that_was_stopped_writes_nothing_under_a_share_that_has_ended():
    async def main():
        loop = asyncio.get_running_loop()
        office, source = Office(), Writing("a", requests_per_window=10, window_s=10.0, answer=verdict)
        async with an_engine(office, source, limits(10)) as engine:
            source.gate = asyncio.Event()
            scoring = asyncio.ensure_future(engine.score_all(samples(4)))
            while len(engine.upstreams["a"].live) < 4:  # noqa: ASYNC110 -- in virtual time
                await asyncio.sleep(0.01)
            source.gate.set()  # connected: the next step of each attempt is to write
            loop._now += 3 * TTL_S  # and the process is stopped before that step
            assert engine.upstreams["a"].quota.valid_until < loop.time()
            outcomes = await scoring
            assert all(isinstance(outcome, Scored) for outcome in outcomes)
            assert [outcome.verdict.attempts for outcome in outcomes] == [2, 2, 2, 2]
        assert len(source.arrivals) == 4  # none of the first attempts was written
        assert source.violations == []
        assert engine.statistics().sources["a"].transient == 0  # and nothing is held against anybody

    run(main())
