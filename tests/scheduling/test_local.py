"""Local functions that hang, crash and raise: it costs the samples that provoke it, and nobody else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.errors import SampleFault, TransientError
from qreward_plugins.samples import Cause, Scored
from qreward_plugins.scheduling.jobs import MAX_FAULTS
from qreward_plugins.scheduling.slices import FIRST_SLICE_S, SHORTEST_SLICE_S
from qreward_plugins.sources.base import Reply

LIMIT_S = 120.0
BAD = 7
"""Samples whose size ends with this digit provoke the fault."""


def is_bad(size):
    return size % 10 == BAD


def function(stage, fault, *, workers, usual_s=0.01, name="f", **source):
    """A local function; `fault` is what becomes of its bad samples."""

    def behaviour(number, request, now):
        return fault if is_bad(request.size) else usual_s

    limits = {"concurrency": workers}
    return stage.add(name, local=True, limits=limits, timeout_s=LIMIT_S, behaviour=behaviour, **source)


def sizes_of(count, bad, *, front):
    """`bad` samples among `count`; at the front they are the longest, which go first."""
    sizes = [1000 + 10 * number for number in range(count)]
    positions = range(count - bad, count) if front else range(0, count, max(1, count // max(bad, 1)))
    for position in list(positions)[:bad]:
        sizes[position] += BAD
    return sizes


FAULTS = {
    "hangs": 1e9,
    "crashes": SampleFault("its worker process died (exit status 3)", reason="crashed"),
    "times out": TransientError("raised TimeoutError"),
    "loses its connection": TransientError("raised ConnectionResetError"),
}


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("front", [True, False], ids=["front", "spread"])
@pytest.mark.parametrize("share", [0.02, 0.1])
@pytest.mark.parametrize("fault", FAULTS)
def test_no_innocent_sample_is_lost_to_those_that_hang_or_crash(stage, fault, share, front, workers):
    function(stage, FAULTS[fault], workers=workers)
    bad = int(512 * share)
    sizes = sizes_of(512, bad, front=front)
    played = stage.play(sizes, hedge=True)
    innocent = [outcome for size, outcome in zip(sizes, played.outcomes, strict=True) if not is_bad(size)]
    guilty = [outcome for size, outcome in zip(sizes, played.outcomes, strict=True) if is_bad(size)]
    assert all(isinstance(outcome, Scored) for outcome in innocent)
    assert len(guilty) == bad
    assert {(outcome.cause, outcome.reward) for outcome in guilty} == {(Cause.INFRA, None)}
    # Whoever raises a time-out last of all may have met an outage as well.
    assert sum(outcome.attempts > MAX_FAULTS for outcome in guilty) <= (0 if fault in ("hangs", "crashes") else workers)
    # What the innocent wait for is one slice of each of the others, never a time limit.
    work_s = 512 * 0.01 / workers
    slices_s = bad * SHORTEST_SLICE_S / workers if fault == "hangs" else 0.0
    assert max(outcome.verdict.latency_s for outcome in innocent) <= 2 * work_s + 1.1 * slices_s + FIRST_SLICE_S + 1
    assert stage.upstreams["f"].breaker.closed
    assert stage.upstreams["f"].state(played.finished_at) == "up"


def test_the_last_try_has_the_whole_time_limit(stage):
    stage.add(
        "f",
        local=True,
        limits={"concurrency": 1},
        timeout_s=LIMIT_S,
        behaviour=lambda n, request, now: 100.0 if request.size > 50 else 0.1,
    )
    played = stage.play([60] + [10] * 30)
    assert played.all_scored
    assert played.outcomes[0].verdict.attempts == 2
    assert played.finished_at < FIRST_SLICE_S + 30 * 0.1 + 100.0 + 1


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("front", [True, False], ids=["front", "spread"])
def test_samples_that_hang_cost_a_batch_one_time_limit_together(stage, front, workers):
    """2 % of 512 samples: their last tries run beside each other, and not one after another."""
    function(stage, 1e9, workers=workers, spare=8)
    sizes = sizes_of(512, 10, front=front)
    played = stage.play(sizes, hedge=True)
    reasons = [getattr(outcome, "reason", "scored") for outcome in played.outcomes]
    assert [reason == "hung" for reason in reasons] == [is_bad(size) for size in sizes]
    assert reasons.count("scored") == 502
    slices_s = FIRST_SLICE_S + 10 * SHORTEST_SLICE_S / workers
    assert played.finished_at <= slices_s + 512 * 0.01 / workers + LIMIT_S + 2
    assert stage.sources["f"].in_flight == 0


def test_a_call_that_had_its_whole_time_limit_is_not_tried_again(stage):
    function(stage, 1e9, workers=4)
    played = stage.play([10] * 3 + [17])
    assert (played.outcomes[3].reason, played.outcomes[3].attempts) == ("hung", 1)
    assert played.finished_at == pytest.approx(LIMIT_S)


def test_last_tries_beside_the_others_take_no_worker_from_the_next_samples(stage):
    import asyncio

    from qreward_plugins.simulation import run

    spare = 8
    function(stage, 1e9, workers=1, spare=spare)

    async def main():
        dispatcher = stage.dispatcher()
        first = [dispatcher.score(stage.sample(17), stage.judge, deadline_s=300) for _ in range(9)]
        first += [dispatcher.score(stage.sample(10), stage.judge, deadline_s=300) for _ in range(5)]
        # One last try takes the only worker, the others run beside it.
        await asyncio.sleep(150)
        assert stage.sources["f"].in_flight == 1 + spare
        later = []
        for _ in range(5):
            later.append(await dispatcher.score(stage.sample(10), stage.judge, deadline_s=100))
            await asyncio.sleep(1)
        assert stage.sources["f"].in_flight >= spare
        await asyncio.gather(*first)
        await dispatcher.aclose()
        return later

    later = run(main())
    assert all(isinstance(outcome, Scored) for outcome in later)
    assert sum(outcome.verdict.latency_s for outcome in later) < 15
    assert stage.idle()


def test_no_last_try_goes_beside_a_limit_of_requests(stage):
    stage.add(
        "f",
        local=True,
        spare=8,
        limits={"concurrency": 2, "requests_per_minute": 600},
        timeout_s=LIMIT_S,
        behaviour=lambda number, request, now: 1e9 if is_bad(request.size) else 0.01,
    )
    source = stage.sources["f"]
    peaks = []
    send = source.send

    async def counted(request, *, on_sent):
        peaks.append(source.in_flight + 1)
        return await send(request, on_sent=on_sent)

    source.send = counted
    stage.play([17] * 6 + [10] * 60)
    assert max(peaks) == 2


def test_a_call_that_keeps_nobody_waiting_is_left_alone(stage):
    stage.add(
        "f",
        local=True,
        limits={"concurrency": 2},
        timeout_s=LIMIT_S,
        behaviour=lambda number, *_: 100.0 if number == 20 else 0.1,
    )
    played = stage.play([10] * 21)
    assert (played.all_scored, played.finished_at) == (True, pytest.approx(101.0, abs=0.2))
    assert sum(outcome.verdict.attempts for outcome in played.outcomes) == 21


@pytest.mark.parametrize("usual_s", [4.0, 20.0, 60.0])
@pytest.mark.parametrize("workers", [1, 4])
def test_a_function_that_is_slow_for_everybody_is_given_its_time(stage, usual_s, workers):
    function(stage, 1e9, workers=workers, usual_s=usual_s)
    played = stage.play([10] * 20, deadline_s=3000)
    assert played.all_scored
    # Before the first answer the slices are too short; what they cost is bounded.
    assert played.finished_at <= 20 * usual_s / workers + 4 * usual_s + 60
    assert max(outcome.verdict.attempts for outcome in played.outcomes) <= MAX_FAULTS


def test_samples_that_hang_do_not_hold_up_the_next_batch(stage):
    import asyncio

    from qreward_plugins.simulation import run

    function(stage, 1e9, workers=1)

    async def main():
        dispatcher = stage.dispatcher()
        first = [dispatcher.score(stage.sample(17), stage.judge, deadline_s=300) for _ in range(3)]
        first += [dispatcher.score(stage.sample(10), stage.judge, deadline_s=300) for _ in range(10)]
        await asyncio.sleep(60)
        second = [dispatcher.score(stage.sample(10), stage.judge, deadline_s=100) for _ in range(10)]
        outcomes = await asyncio.gather(*second)
        await dispatcher.aclose()
        await asyncio.gather(*first)
        return outcomes

    outcomes = run(main())
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert max(outcome.verdict.latency_s for outcome in outcomes) < 15


def test_what_hangs_is_no_silence_and_is_not_asked_of_the_same_function_at_once(stage):
    function(stage, 1e9, workers=8)
    played = stage.play([17] * 8 + [10] * 100, hedge=True)
    assert sum(outcome.reason == "hung" for outcome in played.outcomes if not isinstance(outcome, Scored)) == 8
    assert len([sent for sent in stage.sent if is_bad(sent.size)]) == 16
    assert played.report.hedges == 0
    assert stage.upstreams["f"].quota.concurrency == 8


def test_a_function_whose_service_is_down_for_a_while_loses_nobody(stage):
    def behaviour(number, request, now):
        return TransientError("raised ConnectionRefusedError") if now < 60 else 0.5

    stage.add("f", local=True, limits={"concurrency": 4}, timeout_s=LIMIT_S, behaviour=behaviour)
    played = stage.play([10] * 64)
    assert played.all_scored
    assert played.finished_at < 60 + 30 + 64 * 0.5 / 4


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 8),
    kinds=st.lists(st.sampled_from(["ok", "ok", "ok", "ok", *FAULTS]), min_size=1, max_size=80),
    sizes=st.randoms(use_true_random=False),
)
def test_every_innocent_sample_of_a_function_is_scored(new_stage, workers, kinds, sizes):
    """P11 for local functions."""
    stage = new_stage()
    by_size = {}
    for number, kind in enumerate(kinds):
        by_size[10 + sizes.randrange(100) * 100 + number] = kind
    stage.add(
        "f",
        local=True,
        limits={"concurrency": workers},
        timeout_s=LIMIT_S,
        behaviour=lambda number, request, now: FAULTS.get(by_size[request.size], 0.05),
        answer=lambda request: Reply(text="1"),
    )
    played = stage.play(list(by_size), deadline_s=100 + SHORTEST_SLICE_S * len(kinds) / workers)
    for kind, outcome in zip(by_size.values(), played.outcomes, strict=True):
        assert isinstance(outcome, Scored) is (kind == "ok"), (kind, outcome)
