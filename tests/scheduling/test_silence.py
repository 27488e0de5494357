"""Sources that hang: silence is noticed long before a time limit, attempts are given up; slowness is no silence."""

from __future__ import annotations

import itertools
import random

import pytest

from qreward_plugins.errors import TransientError
from qreward_plugins.scheduling.giving_up import GIVE_UP_AFTER_S, GIVE_UP_AT
from qreward_plugins.scheduling.hedging import OVERDUE_AT
from qreward_plugins.scheduling.jobs import MAX_RESTARTS

HANGS = 1e6
LIMIT_S = 100.0


def hanging(stage, *, usual_s=1.0, since_s=4.5, until_s=float("inf"), places=10, others="b"):
    """Source a hangs for a while; the others are well. `usual_s` is known of all."""

    def behaviour(name):
        return lambda number, request, now: HANGS if name == "a" and since_s <= now < until_s else usual_s

    for name in ("a", *others):
        stage.add(name, limits={"concurrency": places}, behaviour=behaviour(name), timeout_s=LIMIT_S)
        stage.knows(name, usual_s)


@pytest.mark.parametrize("usual_s", [0.05, 0.2, 1.0, 4.0])
def test_a_source_that_hangs_is_noticed_long_before_its_time_limit(stage, usual_s):
    hanging(stage, usual_s=usual_s, since_s=4.5 * usual_s)
    played = stage.play([10] * 200, max_attempts=2)
    a = stage.upstreams["a"]
    assert played.all_scored
    assert stage.counted("a").timeouts == 0
    # 50 of 200 come from a before it hangs, the rest takes b some 15 rounds.
    assert played.finished_at < 25 * usual_s + 8
    assert a.state(played.finished_at) == "down"
    # All that it held was given up; after that it got single probes.
    assert stage.sources["a"].cancelled >= 10
    assert len(stage.sources["a"].arrivals) <= 60 + 6


def test_a_sample_given_up_at_a_silent_source_says_so_when_it_fails(stage):
    hanging(stage, since_s=0.0, others="")
    played = stage.play([10] * 10, deadline_s=30)
    assert {outcome.reason for outcome in played.outcomes} == {"deadline"}
    assert "stopped answering" in played.outcomes[0].detail


def test_a_source_with_noise_and_stragglers_is_not_taken_for_silent(stage):
    rng = random.Random(11)
    stage.add(
        "a",
        limits={"concurrency": 20},
        behaviour=lambda *_: rng.lognormvariate(-0.08, 0.4) * (10 if rng.random() < 0.03 else 1),
    )
    stage.knows("a", 1.0)
    played = stage.play([10] * 600, hedge=True)
    assert played.all_scored
    assert stage.upstreams["a"].breaker.closed
    assert stage.counted("a").transient == 0
    assert max(outcome.verdict.attempts for outcome in played.outcomes) <= 4


def test_one_attempt_that_hangs_is_no_silence(stage):
    stage.add("a", limits={"concurrency": 5}, behaviour=lambda number, *_: HANGS if number == 3 else 1.0)
    stage.knows("a", 1.0)
    trips = []
    trip = stage.upstreams["a"].breaker.trip
    stage.upstreams["a"].breaker.trip = lambda now: trips.append(now) or trip(now)
    assert stage.play([10] * 100).all_scored
    assert trips == []


def test_a_probe_that_is_overdue_has_failed(stage):
    hanging(stage, since_s=0.0)
    played = stage.play([10] * 600, deadline_s=1000)
    assert played.all_scored
    probes = [at for at in stage.sources["a"].arrivals if at > 1.0]
    pauses = [after - before for before, after in itertools.pairwise(probes)]
    assert len(probes) >= 3
    # Each is given time to become overdue, and a longer pause follows than before, up to a bound: samples wait.
    assert all(pause > OVERDUE_AT for pause in pauses)
    assert [round(pause, 3) for pause in pauses] == sorted(round(pause, 3) for pause in pauses)
    assert pauses[-1] > 1.5 * pauses[0]


def test_a_source_that_hung_for_a_while_is_used_again(stage):
    hanging(stage, until_s=20.0)
    played = stage.play([10] * 600, deadline_s=1000)
    assert played.all_scored
    assert stage.upstreams["a"].breaker.closed
    assert sum(at > 25 for at in stage.sources["a"].arrivals) > 50
    assert played.finished_at < 55


@pytest.mark.parametrize("factor", [4.0, 20.0])
def test_a_source_that_became_slow_is_not_starved(stage, factor):
    stage.add(
        "a", limits={"concurrency": 4}, behaviour=lambda number, *_: 1.0 if number < 20 else factor, timeout_s=300
    )
    played = stage.play([10] * 60, deadline_s=3000)
    assert played.all_scored
    assert max(outcome.verdict.attempts for outcome in played.outcomes) <= 8
    assert len(stage.sources["a"].arrivals) < 2 * 60
    assert played.finished_at < 1.6 * (5 + 10 * factor) + 60


# A hopeless attempt at a source that is well


def stubborn(usual_s, seconds):
    """One sample of size 13 takes `seconds` whenever it is asked for, everything else `usual_s` for the size 10."""
    return lambda number, request, now: seconds if request.size == 13 else usual_s * request.size / 10


@pytest.mark.parametrize("seconds", [60.0, HANGS])
def test_a_hopeless_attempt_is_given_up_at_most_twice(stage, seconds):
    stage.add("a", limits={"concurrency": 3}, behaviour=stubborn(1.0, seconds), timeout_s=LIMIT_S)
    stage.knows("a", 1.0)
    played = stage.play([13] + [10] * 60, max_attempts=20, deadline_s=250)
    at = [sent.at for sent in stage.sent if sent.size == 13]
    assert len(at) >= 1 + MAX_RESTARTS
    gaps = [after - before for before, after in itertools.pairwise(at)]
    assert all(GIVE_UP_AT * 1.3 <= gap <= 1.5 * GIVE_UP_AT * 1.3 + 2 for gap in gaps[:MAX_RESTARTS])
    assert all(gap >= LIMIT_S for gap in gaps[MAX_RESTARTS:])
    if seconds < LIMIT_S:
        assert played.outcomes[0].verdict.attempts == 1 + MAX_RESTARTS
        assert played.finished_at == pytest.approx(at[-1] + seconds)
    assert stage.upstreams["a"].breaker.closed


def test_an_attempt_of_a_few_seconds_is_not_given_up_however_little_was_expected(stage):
    stage.add("a", limits={"concurrency": 3}, behaviour=stubborn(0.1, 0.8 * GIVE_UP_AFTER_S))
    stage.knows("a", 0.1)
    played = stage.play([13] + [10] * 30)
    assert played.outcomes[0].verdict.attempts == 1
    assert played.finished_at == pytest.approx(0.8 * GIVE_UP_AFTER_S)


def test_a_hang_at_a_quick_source_is_given_up_after_a_few_seconds(stage):
    stage.add(
        "a", limits={"concurrency": 3}, behaviour=lambda number, *_: HANGS if number == 5 else 0.1, timeout_s=LIMIT_S
    )
    stage.knows("a", 0.1)
    played = stage.play([10] * 30)
    assert played.all_scored
    assert played.finished_at < 2 * GIVE_UP_AFTER_S


def test_nobody_is_given_up_where_nothing_is_known(stage):
    stage.add("a", limits={"concurrency": 3}, behaviour=lambda *_: 50.0)
    played = stage.play([10] * 3)
    assert played.finished_at == pytest.approx(50.0)
    assert [outcome.verdict.attempts for outcome in played.outcomes] == [1, 1, 1]


def test_who_is_hedged_is_not_given_up_as_well(stage):
    for name in "ab":
        stage.add(name, limits={"concurrency": 3}, behaviour=stubborn(1.0, 30.0))
        stage.knows(name, 1.0)
    played = stage.play([13] + [10] * 20, hedge=True)
    assert played.all_scored
    # The first attempt is let to its end.
    assert played.finished_at == pytest.approx(30.0)
    assert played.outcomes[0].verdict.source == next(sent.source for sent in stage.sent if sent.size == 13)


def test_a_source_whose_speed_was_told_by_others_has_not_fallen_silent_before_it_ever_answered(stage):
    """A process that begins may be slow to send and to read: all that it knows is how fast the source was elsewhere."""
    stage.add("a", limits={"concurrency": 20}, behaviour=lambda *_: 2.5)
    stage.upstreams["a"].learned_elsewhere(0.0, pause_s=0.0, open_s=0.0, recovered=False, typical=(10.0, 0.1))
    played = stage.play([10] * 20)
    assert played.all_scored
    assert stage.sources["a"].cancelled == 0
    assert len(stage.sources["a"].arrivals) == 20


def test_a_sample_given_up_at_a_source_that_fails_others_says_so(stage):
    def behaviour(number, request, now):
        return HANGS if number == 0 else TransientError("it broke") if now >= 2.0 else 1.0

    stage.add("a", limits={"concurrency": 4}, behaviour=behaviour, timeout_s=LIMIT_S)
    stage.knows("a", 1.0)
    played = stage.play([10] * 20, deadline_s=2.4)
    details = {getattr(outcome, "detail", "") for outcome in played.outcomes}
    assert any("a failed other samples" in detail for detail in details)
    assert not any("stopped answering" in detail for detail in details)
