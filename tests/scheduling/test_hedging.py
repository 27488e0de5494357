"""Hedges: when a second attempt is started, where, how many of them, and what becomes of the one that loses."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

import pytest

from qreward_plugins.errors import Throttled, TransientError
from qreward_plugins.samples import Scored
from qreward_plugins.scheduling import Batch, Member, ReadyQueue
from qreward_plugins.scheduling.forecast import Forecast
from qreward_plugins.scheduling.hedging import (
    EARLY_PART,
    LEAST_AGE_S,
    LEAST_HEDGES,
    LEAST_SOFT_HEDGES,
    OVERDUE_AT,
    SOFT_AT,
    SOFT_PART,
    Hedges,
)
from qreward_plugins.scheduling.jobs import MAX_HEDGES, MAX_LIVE
from qreward_plugins.scheduling.planner import Planner
from qreward_plugins.simulation import run

USUAL_S = 2.0


class Hedge(NamedTuple):
    at: float
    source: str
    of: str
    """The source of the attempt beside which it was started."""
    age: float
    """The age of that attempt."""
    queued: int
    live: int
    size: int


@pytest.fixture
def hedges(monkeypatch):
    """Every hedge that is started in the test."""
    noted: list[Hedge] = []
    started = Planner.started

    def note(planner, attempt):
        started(planner, attempt)
        if attempt.hedge:
            oldest = min((other for other in attempt.job.live if other is not attempt), key=lambda a: a.started_at)
            now = attempt.started_at
            noted.append(
                Hedge(
                    now,
                    attempt.upstream.name,
                    oldest.upstream.name,
                    oldest.age(now),
                    len(planner.queue),
                    len(attempt.job.live),
                    attempt.job.size,
                )
            )

    monkeypatch.setattr(Planner, "started", note)
    return noted


def alike(stage, names="ab", *, concurrency=4, usual_s=USUAL_S, straggler=lambda name, number, request, now: None):
    """Known sources that take `usual_s`, or what `straggler` says."""
    for name in names:

        def behaviour(number, request, now, name=name):
            special = straggler(name, number, request, now)
            return usual_s if special is None else special

        stage.add(name, limits={"concurrency": concurrency}, concurrency=concurrency, behaviour=behaviour)
        stage.knows(name, usual_s)


def first_takes(seconds):
    """The very first request that comes to any source straggles."""
    sent = []

    def straggler(name, number, request, now):
        sent.append(name)
        return seconds if len(sent) == 1 else None

    return straggler


# When, and where


def test_when_nothing_else_is_to_do_an_attempt_is_hedged_long_before_it_is_overdue(stage, hedges):
    alike(stage, straggler=first_takes(50.0))
    played = stage.play([10], hedge=True)
    (hedge,) = hedges
    assert SOFT_AT <= hedge.age < OVERDUE_AT
    assert hedge.source != hedge.of
    assert played.finished_at == pytest.approx(hedge.at + USUAL_S)
    assert (played.report.hedges, played.outcomes[0].verdict.attempts) == (1, 2)


def test_hedge_off_waits_for_the_straggler(stage, hedges):
    alike(stage, straggler=first_takes(10.0))
    played = stage.play([10] * 5, hedge=False)
    assert (played.finished_at, played.report.hedges, hedges) == (pytest.approx(10.0), 0, [])


def test_whoever_is_early_enough_is_not_hedged(stage, hedges):
    for name in "ab":
        stage.add(name, limits={"concurrency": 4}, behaviour=lambda *_: 0.9 * SOFT_AT * USUAL_S)
        stage.knows(name, USUAL_S)
    assert stage.play([10] * 8, hedge=True).finished_at == pytest.approx(0.9 * SOFT_AT * USUAL_S)
    assert hedges == []


def test_while_jobs_are_queued_only_the_hopeless_are_hedged(stage, hedges):
    alike(stage, straggler=first_takes(200.0))
    # The queue is empty after about 12 s; by then the straggler is overdue.
    played = stage.play([10] * 45, hedge=True)
    while_queued = [hedge for hedge in hedges if hedge.queued]
    assert len(while_queued) == 1
    assert while_queued[0].age >= OVERDUE_AT
    assert played.finished_at < 16


def test_what_ends_before_the_queue_does_is_not_hedged_for_it(stage, hedges):
    alike(stage, straggler=first_takes(5.0 * USUAL_S))
    stage.play([10] * 200, hedge=True)
    assert all(hedge.queued == 0 for hedge in hedges)


def test_the_only_source_is_asked_again_when_an_attempt_hangs(stage, hedges):
    alike(stage, "a", straggler=first_takes(50.0))
    played = stage.play([10] * 3, hedge=True)
    (hedge,) = hedges
    assert (hedge.source, hedge.age >= OVERDUE_AT) == ("a", True)
    assert played.finished_at == pytest.approx(hedge.at + USUAL_S)


def test_a_source_that_looks_dead_gets_no_hedges(stage, hedges):
    alike(stage, "abc", straggler=lambda name, number, request, now: 12.0 if name == "a" else None)
    for name in "bc":
        stage.upstreams[name].breaker.failures_in_row = 4
    stage.judge.sources = ("a", "b")
    played = stage.play([10], hedge=True)
    assert played.all_scored
    assert all(hedge.source == "a" for hedge in hedges)


def test_the_quickest_other_source_is_asked(stage, hedges):
    alike(stage, "ab", straggler=first_takes(50.0))
    stage.add("quick", limits={"concurrency": 1}, behaviour=lambda *_: 1.0)
    stage.knows("quick", 1.0)
    stage.upstreams["quick"].throttled(0.5, 0.0, 0.0)  # it asks for a pause, so another one is asked first
    stage.play([10], hedge=True)
    assert [hedge.source for hedge in hedges] == ["quick"]


def test_guesses_are_not_hedged(stage, hedges):
    for name in "ab":
        stage.add(name, limits={"concurrency": 4}, behaviour=lambda *_: 40.0)
    assert stage.play([10] * 2, hedge=True).finished_at == pytest.approx(40.0)
    assert hedges == []


def test_nothing_young_is_hedged_however_little_was_expected(stage, hedges):
    alike(stage, usual_s=0.01, straggler=first_takes(0.9 * LEAST_AGE_S))
    stage.play([10], hedge=True)
    assert hedges == []


def test_what_is_old_in_multiples_and_in_seconds_is_hedged_at_once(stage, hedges):
    alike(stage, usual_s=0.01, straggler=first_takes(20.0))
    stage.play([10], hedge=True)
    assert hedges[0].at == pytest.approx(LEAST_AGE_S, abs=0.15)


def stream(stage, *, gap_s, count):
    """Hand samples in one by one."""

    async def main():
        dispatcher = stage.dispatcher(hedge=True)
        futures = []
        for _ in range(count):
            futures.append(dispatcher.score(stage.sample(), stage.judge, deadline_s=300))
            await asyncio.sleep(gap_s)
        outcomes = await asyncio.gather(*futures)
        await dispatcher.aclose()
        assert all(isinstance(outcome, Scored) for outcome in outcomes)

    run(main())
    assert stage.idle()


def test_in_a_running_stream_an_idle_source_is_no_reason_to_hedge(stage, hedges):
    alike(stage, straggler=lambda name, number, request, now: 20.0 if 3 <= now < 3.4 else None)
    stream(stage, gap_s=0.5, count=60)
    assert hedges
    # It has taken longer than expected at least.
    assert all(hedge.age > 1.0 > SOFT_AT for hedge in hedges)


def test_in_a_stream_that_has_become_quiet_it_is(stage, hedges):
    alike(stage, usual_s=4.0, straggler=lambda name, number, request, now: 20.0 if 14.4 < now < 14.9 else None)
    stream(stage, gap_s=0.5, count=30)
    assert hedges
    assert hedges[0].age < OVERDUE_AT
    assert hedges[0].at > 14.5 + 1.0


# How many


def all_straggle_first(seconds):
    """The first request of each sample straggles."""
    seen = set()

    def straggler(name, number, request, now):
        if request.size in seen:
            return None
        seen.add(request.size)
        return seconds

    return straggler


@pytest.mark.parametrize("budget", [0.02, 0.1, 0.25, 1.0])
def test_the_budget_of_a_batch_is_kept(stage, hedges, budget):
    alike(stage, concurrency=60, straggler=all_straggle_first(15.0))
    sizes = [1000 + number for number in range(60)]
    for name in "ab":
        stage.knows(name, USUAL_S, size=1000, answers=300)
    played = stage.play(sizes, hedge=True, hedge_budget=budget)
    assert played.all_scored
    assert played.report.hedges == len(hedges)
    assert 0 < len(hedges) <= max(LEAST_HEDGES, budget * len(sizes))


@pytest.fixture
def chosen(stage):
    """How many hedges are chosen for attempts of the given ages, one after the other, of a batch of 80 samples."""

    def choose(*ages, budget=0.25, drained=True, samples=80, under_way=80, member=None):
        async def main():
            for name in "ab":
                stage.add(name, limits={"concurrency": 500})
                stage.knows(name, USUAL_S)
                stage.upstreams[name].heard(1000.0)  # neither of them is silent
            queue, batch = ReadyQueue(), Batch(0, 0.0)
            forecast = Forecast(stage.upstreams, queue)
            hedging = Hedges(stage.upstreams, queue, forecast, budget=budget, on_aged=lambda *_: None)
            jobs = [stage.job(batch=batch, member=member) for _ in range(samples)]
            counts = []
            for number, age in enumerate(ages):
                now = 1000.0 + 0.1 * number
                for job in jobs[:under_way]:
                    job.live.clear()
                    attempt = stage.attempt(job, "a", started_at=now - age * USUAL_S, expected_s=USUAL_S)
                    hedging.watch(attempt, attempt.started_at)
                hedging.advance(now)
                counts.append(len(list(hedging.choose(now, drained=drained))))
                for attempt in list(stage.upstreams["a"].live):
                    attempt.reservation.release(now)
                stage.upstreams["a"].live.clear()
            return counts

        return run(main())

    return choose


@pytest.mark.parametrize("budget", [0.1, 0.25, 0.5])
def test_each_kind_of_hedge_has_its_part_of_the_budget(chosen, budget):
    whole = budget * 80
    soft, early, overdue, more = chosen(0.6, 2.5, 3.5, 4.0, budget=budget)
    assert soft == int(SOFT_PART * whole)
    assert soft + early == int(EARLY_PART * whole)
    assert soft + early + overdue == int(whole)
    assert more == 0


def test_of_a_member_every_call_counts_for_the_budget(chosen):
    member = Member(Batch(0, 0.0))
    assert sum(chosen(0.6, 2.5, 3.5, member=member)) == 0.25 * 80
    assert (member.calls, member.batch.samples) == (80, 1)


def test_a_small_batch_has_a_least_budget(chosen):
    soft, early = chosen(0.6, 2.5, budget=0.01)
    assert soft == LEAST_SOFT_HEDGES
    assert soft + early == LEAST_HEDGES


def test_before_the_queue_is_empty_nothing_but_the_late_is_chosen(chosen):
    soft, late, overdue = chosen(0.9, 2.5, 3.5, drained=False)
    assert (soft, late + overdue) == (0, 20)
    assert late <= EARLY_PART * 20


def test_attempts_that_are_early_are_not_chosen(chosen):
    assert chosen(0.2, 0.9 * SOFT_AT) == [0, 0]


def test_soft_hedges_have_a_part_of_the_budget_of_their_own(stage, monkeypatch):
    alike(stage, concurrency=100, straggler=lambda *_: None)
    batches = []
    started = Planner.started
    monkeypatch.setattr(
        Planner, "started", lambda planner, attempt: (batches.append(attempt.job.batch), started(planner, attempt))[1]
    )
    # Everybody takes a little longer than usual: nothing is overdue, but all are old enough.
    for name in "ab":
        stage.sources[name].behaviour = lambda *_: 1.2 * USUAL_S
    stage.play([10] * 100, hedge=True)
    (batch,) = set(batches)
    assert LEAST_SOFT_HEDGES < batch.soft_hedges <= SOFT_PART * 0.25 * 100
    assert batch.soft_hedges <= batch.hedges <= EARLY_PART * 0.25 * 100


def test_a_small_batch_may_be_hedged_all_the_same(stage, hedges):
    alike(stage, straggler=all_straggle_first(15.0))
    stage.play([10, 11], hedge=True, hedge_budget=0.01)
    assert len(hedges) >= 1


def test_one_sample_has_few_attempts_at_once_and_few_hedges_in_all(stage, hedges):
    alike(stage, "abcdef", straggler=lambda *_: 50.0)
    played = stage.play([10], hedge=True, hedge_budget=1.0)
    assert played.all_scored
    assert 1 <= len(hedges) <= MAX_HEDGES
    assert max(hedge.live for hedge in hedges) == MAX_LIVE


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_hedges_never_exceed_a_declared_concurrency(stage, hedges, seed, known):
    rng = random.Random(seed)
    for name in "abc":
        most = rng.randint(1, 3)
        stage.add(
            name,
            limits={"concurrency": most},
            concurrency=most,
            behaviour=lambda *_: 30.0 if rng.random() < 0.2 else rng.lognormvariate(0, 0.4),
        )
        if known:
            stage.knows(name, 1.0)
    played = stage.play([10] * 40, hedge=True, hedge_budget=1.0)
    assert played.all_scored
    assert hedges
    assert [source.violations for source in stage.sources.values()] == [[], [], []]


def test_a_full_source_of_unknown_speed_is_given_no_hedge(stage, hedges):
    alike(stage, "a", straggler=lambda *_: 11.0)
    stage.add("new", limits={"concurrency": 1}, concurrency=1, behaviour=lambda *_: 25.0)
    played = stage.play([10] * 4, hedge=True, hedge_budget=1.0)
    assert played.all_scored
    assert stage.sources["new"].violations == []


# Who wins


def test_the_loser_is_cancelled_and_what_it_held_is_given_back(stage, hedges):
    limits = {"requests_per_minute": 10, "tokens_per_minute": 10_000, "concurrency": 2}
    stage.judge.completion_tokens = 500
    seconds = {"a": 50.0, "b": 2.0}
    for name in "ab":
        stage.add(name, limits=limits, behaviour=lambda number, request, now, name=name: seconds[name])
        stage.knows(name, 2.0)
    stage.upstreams["b"].throttled(0.2, 0.0, 0.0)  # so that the first attempt goes to a
    played = stage.play([10], hedge=True)
    a = stage.upstreams["a"]
    assert [hedge.source for hedge in hedges] == ["b"]
    assert (played.outcomes[0].verdict.source, played.outcomes[0].verdict.attempts) == ("b", 2)
    assert (stage.sources["a"].cancelled, stage.counted("a").cancelled, stage.counted("b").cancelled) == (1, 1, 0)
    assert (stage.counted("a").answered, stage.counted("a").hedges, stage.counted("b").hedges) == (0, 0, 1)
    assert (a.quota.in_flight, a.quota.requests.held, a.quota.tokens.held) == (0, 0, 0)
    assert not a.live
    # It was sent, so it counts; and it may have been answered, so its completion does, too.
    assert a.quota.requests.spent(played.finished_at) == 1
    # What was cancelled teaches that somebody takes long, and is no failure.
    assert a.breaker.failures_in_row == 0
    assert stage.counted("a").transient == 0


def test_an_attempt_that_beats_its_hedge_wins(stage, hedges):
    alike(stage, straggler=first_takes(2.6))
    played = stage.play([10], hedge=True)
    (hedge,) = hedges
    assert played.finished_at == pytest.approx(2.6)
    assert played.outcomes[0].verdict.source == hedge.of
    assert stage.sources[hedge.source].cancelled == 1


def test_a_hedge_that_fails_does_not_end_the_attempt_beside_it(stage, hedges):
    sent = []

    def straggler(name, number, request, now):
        sent.append(name)
        return 7.0 if len(sent) == 1 else TransientError("reset")

    alike(stage, straggler=straggler)
    played = stage.play([10], hedge=True, max_attempts=1)
    assert hedges
    assert played.all_scored
    assert played.finished_at == pytest.approx(7.0)


def test_a_failed_hedge_is_not_repeated_in_a_storm(stage, hedges):
    sent = []

    def straggler(name, number, request, now):
        sent.append(now)
        return 14.0 if len(sent) == 1 else TransientError("reset")

    alike(stage, "a", straggler=straggler)
    stage.play([10], hedge=True)
    assert len(sent) <= 1 + MAX_HEDGES
    assert len(hedges) <= MAX_HEDGES


def test_a_sample_that_is_overdue_again_and_again_has_a_bounded_number_of_hedges(chosen):
    assert chosen(*[4.0] * 12, budget=1.0, under_way=1) == [1] * MAX_HEDGES + [0] * (12 - MAX_HEDGES)


def test_one_sample_has_few_hedges_in_all_however_large_the_budget(stage, hedges):
    seen = []

    def straggler(name, number, request, now):
        if request.size != 13:
            return 0.5
        seen.append(now)
        return 50.0 if len(seen) == 1 else TransientError("reset")

    alike(stage, straggler=straggler)
    stage.play([13] + [10] * 400, hedge=True, hedge_budget=1.0, max_attempts=50, deadline_s=60)
    assert 1 <= sum(hedge.size == 13 for hedge in hedges) <= MAX_HEDGES


def test_hedging_makes_batches_with_stragglers_much_quicker(new_stage):
    ends = {}
    for hedge in (True, False):
        rng, stage = random.Random(5), new_stage()
        for name in "abc":
            stage.add(
                name,
                limits={"concurrency": 10},
                behaviour=lambda *_, rng=rng: rng.lognormvariate(0, 0.25) * (10 if rng.random() < 0.03 else 1),
            )
            stage.knows(name, 1.0)
        ends[hedge] = stage.play([10] * 200, hedge=hedge).finished_at
    assert ends[True] < 0.8 * ends[False]


def test_an_attempt_that_hangs_is_given_up_even_if_nothing_else_happens(stage):
    """Its source had paused, so it is the only event for minutes."""

    def behaviour(number, request, now):
        return (Throttled("slow down", status=429, retry_after_s=5.0), 500.0)[number] if number < 2 else 1.0

    stage.add("a", behaviour=behaviour, timeout_s=600)
    stage.knows("a", 1.0)
    assert stage.play([10], deadline_s=1000).finished_at < 20
