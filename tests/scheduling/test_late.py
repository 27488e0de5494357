"""Late verdicts: with somebody to tell they are told, and never written over an outcome."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins.errors import TransientError
from qreward_plugins.samples import Failed
from qreward_plugins.scheduling import Cutoff
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply


def played_late(stage, *, deadline_s=5.0, cutoff=None, then_s=100.0, hook=True, close_at=None):
    """One sample whose attempt outlasts its deadline; return (outcome, when, what was told late, and when)."""
    told = []

    async def main():
        loop = asyncio.get_running_loop()
        on_late = (lambda sample, verdict: told.append((loop.time(), sample, verdict))) if hook else None
        dispatcher = stage.dispatcher(on_late=on_late)
        samples = [stage.sample()]
        batch = dispatcher.batches.new([each.group_id for each in samples], cutoff=cutoff)
        future = dispatcher.score(samples[0], stage.judge, deadline_s=deadline_s, batch=batch)
        outcome = await future
        at = dispatcher.now()
        dispatcher.batches.seal(batch)
        await asyncio.sleep(then_s if close_at is None else close_at - at)
        assert future.result() is outcome
        assert dispatcher.waiting == 0
        await dispatcher.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return outcome, at, samples[0]

    outcome, at, sample = run(main())
    assert stage.idle()
    for _, told_of, _ in told:
        assert told_of is sample
    return outcome, at, [(when, verdict) for when, _, verdict in told]


def test_a_verdict_after_the_deadline_is_told_and_the_outcome_stays(stage):
    stage.add("a", behaviour=lambda *_: 20.0, answer=lambda request: Reply(text="0.75"))
    outcome, at, told = played_late(stage)
    assert (outcome.reason, at, outcome.reward) == ("deadline", 5.0, None)
    ((when, verdict),) = told
    assert (when, verdict.score, verdict.source, verdict.attempts) == (20.0, 0.75, "a", 1)
    assert verdict.latency_s == 20.0
    # It was learned from all the same.
    assert stage.counted("a").answered == 1
    assert stage.sources["a"].cancelled == 0


def test_a_verdict_after_the_cutoff_is_told(stage):
    stage.add("a", behaviour=lambda *_: 20.0)
    outcome, at, told = played_late(stage, deadline_s=90, cutoff=Cutoff(3.0, quorum=0.0))
    assert (outcome.reason, at) == ("cutoff", 3.0)
    assert [when for when, _ in told] == [20.0]


def test_without_anybody_to_tell_the_attempt_is_cancelled(stage):
    stage.add("a", behaviour=lambda *_: 20.0)
    outcome, _, told = played_late(stage, hook=False)
    assert isinstance(outcome, Failed)
    assert told == []
    assert stage.sources["a"].cancelled == 1


@pytest.mark.parametrize("end", ["invalid", "transient", "hang"])
def test_what_comes_late_and_is_no_verdict_is_not_told_and_not_tried_again(stage, end):
    async def late(request, *, on_sent):
        stage.sources["a"].arrivals.append(asyncio.get_running_loop().time())
        on_sent()
        await asyncio.sleep(1e6 if end == "hang" else 20.0)
        if end == "transient":
            raise TransientError("reset")
        return Reply(text="bad")

    stage.add("a", timeout_s=60).send = late
    outcome, _, told = played_late(stage)
    assert outcome.reason == "deadline"
    assert told == []
    assert len(stage.sources["a"].arrivals) == 1


def test_closing_ends_late_attempts_and_tells_nobody(stage):
    stage.add("a", behaviour=lambda *_: 20.0)
    _, _, told = played_late(stage, close_at=10.0)
    assert told == []
    assert stage.sources["a"].cancelled == 1


def test_the_caller_who_cancels_is_not_told(stage):
    stage.add("a", behaviour=lambda *_: 20.0)
    told = []

    async def main():
        dispatcher = stage.dispatcher(on_late=lambda *late: told.append(late))
        future = dispatcher.score(stage.sample(), stage.judge, deadline_s=300)
        await asyncio.sleep(1)
        future.cancel()
        await asyncio.sleep(50)
        await dispatcher.aclose()

    run(main())
    assert told == []
    assert stage.sources["a"].cancelled == 1


def test_a_loser_of_a_hedge_is_cancelled_even_if_somebody_waits_for_late_verdicts(stage):
    seconds = iter([50.0])
    told = []
    for name in "ab":
        stage.add(name, behaviour=lambda *_: next(seconds, 2.0))
        stage.knows(name, 2.0)

    async def main():
        dispatcher = stage.dispatcher(hedge=True, on_late=lambda *late: told.append(late))
        await dispatcher.score(stage.sample(), stage.judge, deadline_s=300)
        await asyncio.sleep(100)
        await dispatcher.aclose()

    run(main())
    assert told == []
    assert sum(source.cancelled for source in stage.sources.values()) == 1


def test_a_late_attempt_is_counted_against_the_limits_until_it_ends(stage):
    stage.add("a", behaviour=lambda *_: 20.0, limits={"concurrency": 1}, concurrency=1)

    async def main():
        dispatcher = stage.dispatcher(on_late=lambda *late: None)
        await dispatcher.score(stage.sample(), stage.judge, deadline_s=5)
        await dispatcher.score(stage.sample(), stage.judge, deadline_s=300)
        at = dispatcher.now()
        await dispatcher.aclose()
        return at

    assert run(main()) == pytest.approx(40.0)
    assert stage.sources["a"].violations == []
