"""The dispatcher's own work must grow with the number of samples, not with its square: it runs on the event loop."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins.errors import SourceUnusable, Throttled, TransientError
from qreward_plugins.samples import Scored
from qreward_plugins.scheduling import ReadyQueue
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply

SAMPLES = 600
IN_FLIGHT = 200


@pytest.mark.parametrize(
    "error",
    [SourceUnusable("401", status=401), TransientError("reset"), Throttled("429", retry_after_s=5)],
    ids=["unusable", "transient", "throttled"],
)
def test_a_source_that_fails_a_burst_does_not_move_the_whole_queue_for_each(stage, monkeypatch, error):
    async def fails_late(request, *, on_sent):
        on_sent()
        await asyncio.sleep(0.5)
        raise error

    stage.add("a", limits={"concurrency": IN_FLIGHT}).send = fails_late
    stage.add("b", limits={"concurrency": 10}, answer=lambda request: Reply(text="1"))
    pushes = []
    push = ReadyQueue.push
    monkeypatch.setattr(ReadyQueue, "push", lambda queue, *args: (pushes.append(1), push(queue, *args)))

    async def main():
        dispatcher = stage.dispatcher(max_attempts=20)
        futures = [dispatcher.score(stage.sample(), stage.judge, deadline_s=900) for _ in range(SAMPLES)]
        outcomes = await asyncio.gather(*futures)
        await dispatcher.aclose()
        return outcomes

    assert all(isinstance(outcome, Scored) for outcome in run(main()))
    assert len(pushes) < 5 * (SAMPLES + IN_FLIGHT)
