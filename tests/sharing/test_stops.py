"""A process that is stopped and goes on: what it was about to write when its share ended meanwhile is not written."""

from __future__ import annotations

import asyncio
import secrets

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sharing import Keeper
from qreward_plugins.sharing.keeper import TTL_S
from qreward_plugins.simulation import SimulatedSource, run
from qreward_plugins.sources import Reply


class Near:
    """A keeper that answers on the spot, or as soon as there is something to say."""

    def __init__(self):
        self.keeper = Keeper(0.0, boot=secrets.token_hex(4), first=True)
        self.calls = {}

    async def exchange(self, report):
        loop = asyncio.get_running_loop()
        call = self.calls[report.worker, report.number] = loop.create_future()
        self.keeper.report(report, loop.time())
        self._pump()
        return await call

    def _pump(self):
        loop = asyncio.get_running_loop()
        for due in self.keeper.due(loop.time()):
            call = self.calls.pop((due.worker, due.number))
            if not call.done():
                call.set_result(due.answer)
        if self.calls:
            loop.call_at(self.keeper.wake_at(loop.time()) + 1e-3, self._pump)

    async def end_keeper(self):
        raise AssertionError("it answers")


class Writing(SimulatedSource):
    """A source that connects first, and says that it writes before it does."""

    gate = None

    async def send(self, request, *, on_sent):
        if self.gate is not None:
            await self.gate.wait()
        on_sent()
        return await super().send(request, on_sent=lambda: None)


def test_a_process_that_was_stopped_writes_nothing_under_a_share_that_has_ended():
    async def main():
        loop = asyncio.get_running_loop()
        source = Writing(
            "a",
            requests_per_window=10,
            window_s=5.0,
            answer=lambda request: Reply(text=f'{{"id": "{request.nonce}", "score": 0.5}}', usage=Usage(9, 9)),
        )
        tree = {
            "sources": {
                "a": {
                    "kind": "openai",
                    "base_url": "http://localhost",
                    "model": "judge",
                    "limits": {"requests_per_minute": 120, "window_s": 5, "window": "sliding"},
                }
            },
            "judges": {"quality": {"kind": "llm", "score_range": [0, 1]}},
            "engine": {"seed": 7, "deadline_s": 600.0},
        }
        samples = [Sample([{"role": "user", "content": "Which?"}], f"It is {number}.") for number in range(4)]
        async with RewardEngine(tree, sources={"a": source}, channel=Near()) as engine:
            source.gate = asyncio.Event()
            scoring = asyncio.ensure_future(engine.score_all(samples))
            while len(engine.upstreams["a"].live) < 4:  # noqa: ASYNC110 -- in virtual time
                await asyncio.sleep(0.01)
            source.gate.set()  # connected: the next step of each attempt is to write
            loop._now += 3 * TTL_S  # and the process is stopped before that step
            went_on_at = loop.time()
            valid_until = engine.upstreams["a"].quota.valid_until
            assert valid_until < went_on_at
            outcomes = await scoring
            assert all(isinstance(outcome, Scored) for outcome in outcomes)
            assert [outcome.verdict.attempts for outcome in outcomes] == [2, 2, 2, 2]
        assert len(source.arrivals) == 4  # none of the first attempts was written
        assert source.violations == []
        assert engine.statistics().sources["a"].transient == 0  # and nothing is held against anybody

    run(main())
