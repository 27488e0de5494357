"""Cancellations that the dispatcher did not cause, and requests that must not be sent any more: no job is ever lost."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.errors import TransientError
from qreward_plugins.samples import Failed, Scored
from qreward_plugins.scheduling import Cutoff
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply


async def cancelled_future():
    """What a function awaits that shares a future with others, one of whom cancels it."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(1)


async def raises_it():
    raise asyncio.CancelledError


CANCELLATIONS = {"a shared future": cancelled_future, "its own task": cancels_itself, "raised": raises_it}


class Faulty:
    """A source that cancels `times` requests in its own ways before it answers the rest after a second."""

    name = model = "a"
    slots = None

    def __init__(self, cancel=raises_it, *, times=1, sends_first=True):
        self.cancel, self.times, self.sends_first = cancel, times, sends_first
        self.asked = self.sent = 0

    async def send(self, request, *, on_sent):
        self.asked += 1
        if self.asked > self.times or self.sends_first:
            on_sent()
            self.sent += 1
        if self.asked <= self.times:
            await self.cancel()
        await asyncio.sleep(1)
        return Reply(text="1")

    async def aclose(self):
        pass


def scored_by(stage, source, *, count=1, deadline_s=30.0, meanwhile=None):
    """Score samples at this source, and look for lost jobs on the way; `meanwhile` runs beside it."""
    stage.add("a")
    stage.upstreams["a"].source = source

    async def main():
        dispatcher = stage.dispatcher()
        futures = [dispatcher.score(stage.sample(), stage.judge, deadline_s=deadline_s) for _ in range(count)]
        beside = asyncio.ensure_future(meanwhile(stage, futures)) if meanwhile is not None else None
        while not all(future.done() for future in futures):
            await asyncio.sleep(0.01)
            assert dispatcher.stuck_jobs() == []
        if beside is not None:
            await beside
        ended_at = dispatcher.now()
        await dispatcher.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert stage.upstreams["a"].quota.in_flight == 0
        return [future.result() for future in futures], ended_at

    return run(main())


@pytest.mark.parametrize("sends_first", [True, False])
@pytest.mark.parametrize("how", CANCELLATIONS)
def test_an_attempt_that_somebody_else_cancels_has_failed_and_the_job_is_asked_again(stage, how, sends_first):
    source = Faulty(CANCELLATIONS[how], sends_first=sends_first)
    (outcome,), ended_at = scored_by(stage, source)
    assert isinstance(outcome, Scored)
    assert outcome.verdict.attempts == source.asked == 2
    assert ended_at < 3


def test_a_source_that_is_always_cancelled_fails_the_job_with_the_reason(stage):
    (outcome,), _ = scored_by(stage, Faulty(times=10**6), deadline_s=300)
    assert isinstance(outcome, Failed)
    assert "cancelled by another task" in outcome.detail


def test_an_attempt_that_is_cancelled_before_its_first_step_is_asked_again(stage):
    async def cancel_it(stage, futures):
        # The pump has run, and the task of the attempt has not begun.
        (task,) = [task for task in asyncio.all_tasks() if "_run" in task.get_coro().__qualname__]
        task.cancel()

    source = Faulty(times=0)
    (outcome,), _ = scored_by(stage, source, meanwhile=cancel_it)
    assert isinstance(outcome, Scored)
    assert (outcome.verdict.attempts, source.asked) == (2, 1)


# A share that ends inside of the first send


class Connecting:
    """A source that takes its time before it sends, and makes `of_it` of what is raised inside of `on_sent`."""

    name = model = "a"
    slots = None

    def __init__(self, of_it):
        self.of_it = of_it
        self.written = []

    async def send(self, request, *, on_sent):
        await asyncio.sleep(0.5)
        try:
            on_sent()
        except asyncio.CancelledError:
            if self.of_it == "hangs":
                await asyncio.sleep(1e6)
            if self.of_it == "fails":
                raise TransientError("the connection was lost") from None
            raise
        self.written.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1)
        return Reply(text="1")

    async def aclose(self):
        pass


@pytest.mark.parametrize("of_it", ["passes it on", "fails", "hangs"])
def test_what_is_not_sent_because_its_share_has_ended_is_asked_again_and_held_against_nobody(stage, of_it):
    async def share_ends(stage, futures):
        stage.upstreams["a"].quota.valid_until = 0.3
        await asyncio.sleep(5)
        stage.upstreams["a"].quota.valid_until = math.inf

    source = Connecting(of_it)
    outcomes, _ = scored_by(stage, source, count=3, meanwhile=share_ends)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert len(source.written) == 3
    assert stage.counted("a").transient == 0
    assert stage.upstreams["a"].breaker.failures_in_row == 0


# Nothing is sent after the outcome is out


def test_a_job_that_a_cutoff_ends_while_it_is_put_in_the_queue_is_not_sent(stage):
    source = stage.add("a", limits={"tokens_per_minute": 70})

    async def main():
        dispatcher = stage.dispatcher()
        # The first fits nowhere and fails; that ends the batch, and with it the second.
        samples = [stage.sample(10_000), stage.sample(10)]
        batch = dispatcher.batches.new([each.group_id for each in samples], cutoff=Cutoff(0.0, quorum=0.0))
        futures = [dispatcher.score(each, stage.judge, deadline_s=30, batch=batch) for each in samples]
        outcomes = await asyncio.gather(*futures)
        await asyncio.sleep(5)
        assert not dispatcher.waiting
        await dispatcher.aclose()
        return outcomes

    assert [outcome.reason for outcome in run(main())] == ["no_source", "cutoff"]
    assert source.arrivals == []


@pytest.mark.parametrize("given_up", ["deadline", "cut off", "cancelled"])
@pytest.mark.parametrize("late", [False, True])
def test_what_was_not_sent_when_the_outcome_was_out_is_not_sent_any_more(stage, given_up, late):
    stage.add("a")
    source = stage.upstreams["a"].source = Connecting("passes it on")

    async def main():
        dispatcher = stage.dispatcher(on_late=(lambda *_: None) if late else None)
        samples = [stage.sample()]
        cutoff = Cutoff(0.25, quorum=0.0) if given_up == "cut off" else None
        batch = dispatcher.batches.new([each.group_id for each in samples], cutoff=cutoff)
        deadline_s = 0.25 if given_up == "deadline" else 30
        future = dispatcher.score(samples[0], stage.judge, deadline_s=deadline_s, batch=batch)
        await asyncio.sleep(0.25)
        if given_up == "cancelled":
            future.cancel()
        await asyncio.sleep(5)
        assert future.done()
        await dispatcher.aclose()

    run(main())
    assert source.written == []
    assert stage.upstreams["a"].quota.in_flight == 0


# Whatever is cancelled


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_whatever_is_cancelled_by_whomever_every_job_ends_by_its_deadline_and_nothing_is_left(new_stage, data):
    stage = new_stage()
    stage.add("a", limits={"concurrency": data.draw(st.integers(1, 4))})
    stage.add("b", limits={"concurrency": data.draw(st.integers(1, 4))})
    ways = data.draw(st.lists(st.sampled_from(["well", "error", "outside", *CANCELLATIONS]), min_size=4, max_size=12))

    class Any(Faulty):
        async def send(self, request, *, on_sent):
            way = ways[self.asked % len(ways)]
            self.asked += 1
            on_sent()
            await asyncio.sleep(0.1)
            if way in CANCELLATIONS:
                await CANCELLATIONS[way]()
            if way == "error":
                raise TransientError("reset")
            if way == "outside":
                asyncio.get_running_loop().call_later(0.1, asyncio.current_task().cancel)
            await asyncio.sleep(0.5)
            return Reply(text="1")

    stage.upstreams["a"].source = Any()

    async def main():
        dispatcher = stage.dispatcher(hedge=True)
        deadlines = data.draw(st.lists(st.sampled_from([0.3, 2.0, 60.0]), min_size=1, max_size=12))
        futures = [dispatcher.score(stage.sample(), stage.judge, deadline_s=each) for each in deadlines]
        ended = {}
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: ended.setdefault(number, dispatcher.now()))
        while not all(future.done() for future in futures):
            await asyncio.sleep(0.05)
            assert dispatcher.stuck_jobs() == []
        await asyncio.sleep(0)
        assert all(ended[number] <= due + 1e-6 for number, due in enumerate(deadlines))
        await dispatcher.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    assert all(upstream.quota.in_flight == 0 and not upstream.live for upstream in stage.upstreams.values())
