"""What no sample is to blame for does not end it: an outage of hours, our own restarts, our own bugs, its own size."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.errors import Throttled, TransientError
from qreward_plugins.samples import Cause, Scored
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply

REFUSED = TransientError("connection refused")
BROKEN = TransientError("answered 503", status=503)


class Unreachable:
    """Cannot be reached until `until`: nothing of a request is sent before."""

    def __init__(self, name, until):
        self.name, self.model, self.slots, self.until = name, "", None, until
        self.tries = []

    async def send(self, request, *, on_sent):
        now = asyncio.get_running_loop().time()
        self.tries.append(now)
        if now < self.until:
            raise REFUSED
        on_sent()
        await asyncio.sleep(0.1)
        return Reply(text="1")

    async def aclose(self):
        pass


@pytest.mark.parametrize(
    ("outage_s", "samples", "max_attempts"), [*itertools.product([20.0, 600.0], [1, 3], [1, 6]), (5000.0, 3, 1)]
)
def test_who_cannot_reach_its_judge_waits_for_it_and_uses_it_at_once(stage, outage_s, samples, max_attempts):
    stage.add("a", timeout_s=30)
    stage.upstreams["a"].source = source = Unreachable("a", outage_s)
    played = stage.play([10] * samples, deadline_s=4 * 3600, max_attempts=max_attempts)
    assert played.all_scored
    assert played.finished_at <= outage_s + 6
    assert len(source.tries) <= outage_s + 20, "one a second at most"


@pytest.mark.parametrize("outage_s", [600.0, 5000.0])
def test_an_outage_that_several_samples_see_costs_them_no_tries(stage, outage_s):
    stage.add("a", timeout_s=30, behaviour=lambda number, request, now: BROKEN if now < outage_s else 0.1)
    played = stage.play([10] * 4, deadline_s=4 * 3600)
    assert played.all_scored
    assert played.finished_at <= outage_s + 6


@pytest.mark.parametrize("bad", [1, 2, 5])
def test_samples_that_fail_while_others_are_answered_are_exhausted_soon(stage, bad):
    stage.add("a", timeout_s=30, behaviour=lambda number, request, now: BROKEN if request.size > 900 else 0.1)
    played = stage.play([901 + n for n in range(bad)] + [10] * 30, deadline_s=4 * 3600)
    assert all(isinstance(outcome, Scored) for outcome in played.outcomes[bad:])
    assert {outcome.reason for outcome in played.outcomes[:bad]} == {"exhausted"}
    assert played.finished_at < 900


def test_one_sample_that_always_fails_alone_is_exhausted_soon(stage):
    stage.add("a", timeout_s=30, behaviour=lambda *_: BROKEN)
    played = stage.play([10], deadline_s=4 * 3600)
    assert [outcome.reason for outcome in played.outcomes] == ["exhausted"]
    assert played.finished_at < 600


@pytest.mark.parametrize("max_attempts", [1, 2])
@pytest.mark.parametrize("slow_s", [9.0, 50.0])
def test_what_we_restart_is_not_exhausted(stage, max_attempts, slow_s):
    """It is slow every time, and healthy."""
    stage.add(
        "a",
        timeout_s=120,
        limits={"concurrency": 2},
        behaviour=lambda number, request, now: slow_s if request.size == 11 else 0.1,
    )
    stage.knows("a", 0.1)

    async def main():
        dispatcher = stage.dispatcher(max_attempts=max_attempts)
        slow = dispatcher.score(stage.sample(11), stage.judge, deadline_s=900)
        while not slow.done():
            await dispatcher.score(stage.sample(10), stage.judge, deadline_s=900)
        await dispatcher.aclose()
        return slow.result()

    assert isinstance(run(main()), Scored)


@pytest.mark.parametrize("max_attempts", [1, 6])
def test_rescues_from_a_silent_source_exhaust_nobody(stage, max_attempts):
    stage.add("a", timeout_s=600, behaviour=lambda *_: 1e9 if _[2] < 40 else 0.1)
    stage.add("b", limits={"concurrency": 2}, behaviour=lambda *_: 0.5)
    stage.knows("a", 0.1)
    stage.knows("b", 0.5)
    assert stage.play([10] * 64, max_attempts=max_attempts).all_scored


@pytest.mark.parametrize("priority", [0, 3])
def test_samples_that_hang_a_remote_judge_are_tried_again_after_all_others(stage, priority):
    """A second try of each would leave the others no time, those of a later batch and of a lower priority included."""
    stage.add(
        "a",
        timeout_s=20,
        limits={"concurrency": 1},
        behaviour=lambda number, request, now: 1e9 if request.size > 900 else 1.0,
    )

    async def main():
        dispatcher = stage.dispatcher()
        first, second = dispatcher.batches.new([None] * 80, priority=priority), dispatcher.batches.new([None] * 40)
        hanging = [dispatcher.score(stage.sample(1000), stage.judge, deadline_s=1000, batch=first) for _ in range(40)]
        innocent = [dispatcher.score(stage.sample(10), stage.judge, deadline_s=1000, batch=first) for _ in range(40)]
        innocent += [dispatcher.score(stage.sample(10), stage.judge, deadline_s=1000, batch=second) for _ in range(40)]
        outcomes = await asyncio.gather(*hanging), await asyncio.gather(*innocent)
        await dispatcher.aclose()
        return outcomes

    hanging, innocent = run(main())
    assert all(isinstance(outcome, Scored) for outcome in innocent)
    assert not any(isinstance(outcome, Scored) for outcome in hanging)


@pytest.mark.parametrize("gap_s", [0.05, 0.5])
def test_a_request_larger_than_its_window_goes_before_its_deadline_whatever_else_comes(stage, gap_s):
    stage.add("a", limits={"tokens_per_minute": 2000}, behaviour=lambda *_: 0.1)

    async def main():
        dispatcher = stage.dispatcher()
        large = dispatcher.score(stage.sample(2500), stage.judge, deadline_s=600)
        small = []
        while not large.done():
            small.append(dispatcher.score(stage.sample(40), stage.judge, deadline_s=3600))
            await asyncio.sleep(gap_s)
        outcome = large.result()
        await dispatcher.aclose()
        return outcome

    outcome = run(main())
    assert isinstance(outcome, Scored)
    assert outcome.verdict.latency_s < 450


class Bug(Exception):
    pass


def broken(*_, **__):
    raise Bug


@pytest.mark.parametrize("where", ["arrange", "placements", "ended", "started"])
def test_a_bug_of_the_planner_stalls_nobody(stage, where, caplog):
    stage.add("a", limits={"concurrency": 4}, behaviour=lambda *_: 0.5)

    async def main():
        dispatcher = stage.dispatcher()
        setattr(dispatcher._planner, where, broken)
        futures = [dispatcher.score(stage.sample(), stage.judge, deadline_s=300) for _ in range(40)]
        outcomes = await asyncio.gather(*futures)
        finished_at = dispatcher.now()
        await dispatcher.aclose()
        return outcomes, finished_at

    outcomes, finished_at = run(main())
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert finished_at < 20
    assert sum("this is a bug" in record.message for record in caplog.records) == 1


def test_an_observer_that_raises_stops_nothing(stage, caplog):
    stage.add("a")

    async def main():
        dispatcher = stage.dispatcher()
        dispatcher._on_pumped = broken
        outcomes = await asyncio.gather(
            *(dispatcher.score(stage.sample(), stage.judge, deadline_s=300) for _ in range(40))
        )
        await dispatcher.aclose()
        return outcomes

    assert all(isinstance(outcome, Scored) for outcome in run(main()))
    assert sum("this is a bug" in record.message for record in caplog.records) == 1


def test_a_request_that_breaks_the_scheduler_costs_its_sample_only(stage, caplog):
    stage.add("a", behaviour=lambda *_: 0.5)
    upstream = stage.upstreams["a"]
    reserve = upstream.reserve
    upstream.reserve = lambda request, now, **more: broken() if request.size == 13 else reserve(request, now, **more)
    played = stage.play([10, 13, 10, 10])
    assert [isinstance(outcome, Scored) for outcome in played.outcomes] == [True, False, True, True]
    assert (played.outcomes[1].cause, played.outcomes[1].reason) == (Cause.INFRA, "bug")
    assert played.finished_at < 5


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 900), min_size=2, max_size=12),
    limit=st.integers(1500, 6000),
    outage_s=st.floats(1, 200),
    fault=st.sampled_from([REFUSED, BROKEN, 1e9]),
)
def test_a_source_with_tokens_left_is_probed_with_what_fits(new_stage, sizes, limit, outage_s, fault):
    """Nothing under way, a source that may be probed and a sample whose tokens fit: that does not last."""
    stage = new_stage()
    behaviour = lambda number, request, now: fault if now < outage_s else 0.1  # noqa: E731
    stage.add("a", timeout_s=10, limits={"tokens_per_minute": limit}, behaviour=behaviour)
    upstream = stage.upstreams["a"]
    stalled_s = 0.0

    async def main():
        nonlocal stalled_s
        dispatcher = stage.dispatcher()
        futures = [dispatcher.score(stage.sample(size), stage.judge, deadline_s=600) for size in sizes]
        while not all(future.done() for future in futures):
            await asyncio.sleep(0.5)
            now = dispatcher.now()
            waiting = dispatcher._planner.queue.jobs("a")
            idle = not (upstream.live or upstream.breaker.closed)
            ready = idle and any(upstream.wait_s(upstream.tokens(job.request), now) <= 0 for job in waiting)
            stalled_s = stalled_s + 0.5 if ready else 0.0
            assert stalled_s < 2
        await dispatcher.aclose()

    run(main())


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("position", [0, 5, 11])
def test_a_sample_that_is_always_throttled_takes_the_source_from_nobody(stage, concurrency, position):
    """P11: some servers answer a request that is too large for a limit with 429, each time."""
    stage.add(
        "a",
        limits={"concurrency": concurrency},
        behaviour=lambda number, request, now: Throttled("429", retry_after_s=1.0) if request.size == 13 else 0.3,
    )
    played = stage.play([13 if number == position else 10 for number in range(12)])
    assert [isinstance(outcome, Scored) for outcome in played.outcomes] == [n != position for n in range(12)]
    others = [outcome for outcome in played.outcomes if isinstance(outcome, Scored)]
    assert max(outcome.verdict.latency_s for outcome in others) < 60


@pytest.mark.parametrize("period_s", [1, 2, 5])
def test_probes_do_not_keep_step_with_a_source_that_is_up_and_down_by_turns(stage, period_s):
    stage.add("a", behaviour=lambda number, request, now: 0.5 if now // period_s % 2 else BROKEN)
    played = stage.play([10] * 200, deadline_s=600)
    assert sum(isinstance(outcome, Scored) for outcome in played.outcomes) >= 190


def test_a_pause_that_is_no_number_is_none(stage):
    stage.add(
        "a", behaviour=lambda number, request, now: Throttled("429", retry_after_s=float("nan")) if now < 9 else 0.3
    )
    assert stage.play([10] * 12).all_scored
