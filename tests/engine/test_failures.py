"""Whose fault a failure is, and what follows: outages, hangs, garbage, refusals, poison, in virtual time; and functions
of a user that hang or die.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

import pytest

from qreward_plugins import InvalidReply, RewardEngine, Sample, Scored, SourceStateChanged
from qreward_plugins.errors import PermanentError, SampleRefused, SourceHeld, SourceUnusable, Throttled, TransientError
from qreward_plugins.scheduling.jobs import MAX_RESTARTS
from qreward_plugins.scheduling.upstream import Upstream
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import Reply

from ..kit import NEVER_S, Recorder, Stage, fails, hangs, make_sample, make_samples, now, scored_text

BROKEN = TransientError("answered 503", status=503)
POISON = "poison"


def options(limits=None, *, judge=None, total_s=30, **engine):
    engine = {"deadline_s": 4 * 3600.0, "scheduling": {"hedge": False}, **engine}
    return {"engine": engine, "limits": limits or {}, "judge": judge or {}, "total_s": total_s}


def places(count, names="ab"):
    return {name: {"concurrency": count} for name in names}


def sized(first, count):
    """Samples of different lengths."""
    return [make_sample(number, response="x" * (50 + number % 50)) for number in range(first, first + count)]


def poisoned(count):
    return [make_sample(1000 + number, response=f"{POISON} {number} {'x' * 99}") for number in range(count)]


def is_poison(request):
    return request.sample.response.startswith(POISON)


def poison_is(end, *, others=1.0):
    """The source does this to poisoned samples."""
    return lambda number, request, now: end if is_poison(request) else others


def down_until(at, error=BROKEN, seconds=0.1):
    return lambda number, request, now: error if now < at else seconds


def labels(outcomes):
    return {"scored" if isinstance(outcome, Scored) else outcome.label for outcome in outcomes}


# Which errors are asked about again


@pytest.mark.parametrize(
    ("error", "requests", "scored"),
    [
        (TransientError("503"), 2, True),
        (Throttled("429", retry_after_s=7.0), 2, True),
        (InvalidReply("no verdict"), 2, True),
        (SampleRefused("too long"), 1, False),
        (PermanentError("401"), 1, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_class_of_an_error_decides_whether_it_is_asked_again(error, requests, scored):
    stage = Stage({"a": fails(error, times=1)}, options=options())
    played = stage.play(make_samples(1))
    assert (len(stage.sent), played.all_scored) == (requests, scored)


# Outages


def test_retries_come_no_faster_than_their_budget():
    """Of 1,100 samples each second one fails once, the first hundred excepted, so that the circuit stays closed. 100
    retries go at once, then one for five answers, and ten per second.
    """
    tried: set[str] = set()
    retried: list[tuple[float, int]] = []
    ends: list[float] = []

    def fails_once(number, request, now):
        again = request.sample.id in tried
        tried.add(request.sample.id)
        if again:
            retried.append((now, sum(end <= now for end in ends)))
        elif len(tried) > 100 and len(tried) % 2:
            return BROKEN
        took_s = 0.05 + 0.1 * (number * 0.618 % 1)
        ends.append(now + took_s)
        return took_s

    played = Stage({"a": fails_once}, options=options(places(50, "a"))).play(make_samples(1100))
    assert played.all_scored
    assert len(retried) == 500
    began_at, answers = retried[0]
    left = [100 + 10 * (at - began_at) + 0.2 * (n - answers) - number for number, (at, n) in enumerate(retried, 1)]
    assert min(left) >= -1
    assert 26 < played.finished_s < 27.5  # the last 260 wait for each other


def test_a_dead_source_is_not_asked_until_a_probe_is_answered(caplog):
    recorder = Recorder()
    limits = {"a": {"concurrency": 4}, "b": {"concurrency": 1}}
    stage = Stage({"a": down_until(60.0, seconds=1.0), "b": 1.0}, options=options(limits))
    outcomes = stage.run(lambda engine: engine.score_all(make_samples(120)), recorder)
    assert labels(outcomes) == {"scored"}
    asked = [each.at for each in stage.sent if each.source == "a"]
    assert sum(at < 60.0 for at in asked) <= 68  # four at first, and a probe a second, two before
    assert sum(at >= 60.0 for at in asked) >= 5
    changes = [event for event in recorder.of(SourceStateChanged) if event.source == "a"]
    told = [(event.before, event.state, event.problem) for event in (changes[0], changes[-1])]
    assert told == [("up", "down", "a is down (answered 503)"), ("down", "up", "")]
    assert sum("is down" in record.getMessage() for record in caplog.records) == 1


def test_a_function_survives_an_outage_of_a_service_behind_it():
    rule = SimulatedSource("a", behaviour=down_until(20.0), answer=scored_text, model="m", local=True)
    assert Stage({"a": rule}, options=options(places(4, "a"))).play(make_samples(8)).all_scored


def test_samples_that_make_a_function_hang_do_not_keep_its_workers_from_the_others():
    """While others wait, a call gets a slice of time, which is shorter than its time limit."""
    rule = SimulatedSource("a", behaviour=poison_is(NEVER_S, others=0.1), answer=scored_text, model="m", local=True)
    played = Stage({"a": rule}, options=options(places(2, "a"), total_s=600)).play(
        poisoned(4) + make_samples(40), deadline_s=120.0
    )
    assert [isinstance(outcome, Scored) for outcome in played.outcomes] == [False] * 4 + [True] * 40


class HeldBack(SimulatedSource):
    """Answers until a time, and hangs then. From then on it refuses one sample itself, once a second."""

    async def send(self, request, *, on_sent):
        if request.sample.response == "held":
            await asyncio.sleep(1.0)
            raise SourceHeld("its servers sleep")
        return await super().send(request, on_sent=on_sent)


def test_a_call_that_was_never_sent_is_no_sign_of_life():
    behaviour, seen = lambda number, request, now: NEVER_S if now > 50.0 else 1.0, Recorder()
    source = HeldBack("a", behaviour=behaviour, answer=scored_text)
    stage = Stage({"a": source}, options=options(places(8, "a"), total_s=600))

    async def main(engine):
        await engine.score_all(make_samples(100))
        await asyncio.sleep(60.0 - now())
        await engine.score_all([*make_samples(6), make_sample(response="held")], deadline_s=100.0)

    stage.run(main, seen)
    assert [event.state for event in seen.of(SourceStateChanged)][:1] == ["down"]


class Unreachable(SimulatedSource):
    """Cannot be reached until a time: nothing of a request is sent before."""

    until = 600.0

    async def send(self, request, *, on_sent):
        if asyncio.get_running_loop().time() < self.until:
            self.arrivals.append(asyncio.get_running_loop().time())
            raise TransientError("connection refused")
        return await super().send(request, on_sent=on_sent)


@pytest.mark.parametrize("count", [1, 3])
def test_samples_wait_for_a_judge_that_cannot_be_reached_and_use_it_at_once(count):
    source = Unreachable("a", answer=scored_text)
    played = Stage({"a": source}, options=options(max_attempts=2)).play(make_samples(count))
    assert played.all_scored
    assert 600.0 <= played.finished_s <= 606.0
    assert len(source.arrivals) <= 620  # one a second


def test_an_outage_that_several_samples_see_costs_them_no_tries():
    played = Stage({"a": down_until(1000.0)}, options=options(max_attempts=2)).play(make_samples(4))
    assert played.all_scored
    assert played.finished_s <= 1006.0


@pytest.mark.parametrize("count", [8, 40])
def test_answers_to_older_requests_do_not_end_an_outage_and_so_cost_no_tries(count):
    a = lambda number, request, now: BROKEN if 5.0 <= now < 10.0 else 2.0 + number % 7 / 10  # noqa: E731
    assert Stage({"a": a}, options=options(places(count, "a"))).play(make_samples(10 * count)).all_scored


def test_an_outage_that_all_waiting_samples_see_costs_them_no_tries():
    rng = random.Random(1)
    a = lambda number, request, now: BROKEN if 3.0 <= now < 23.0 else 4.0 * rng.uniform(0.6, 1.5)  # noqa: E731
    assert Stage({"a": a}, options=options(places(32, "a"))).play(make_samples(48)).all_scored


@pytest.mark.parametrize(
    ("most", "count", "seconds", "well_s"), [(2, 16, 1.0, 2.0), (2, 10, 4.0, 6.0), (4, 10, 10.0, 6.0)]
)
def test_a_second_outage_costs_no_tries_either(most, count, seconds, well_s):
    """A probe that failed in the first one tells nothing about its sample."""
    a = lambda number, request, now: BROKEN if 5 <= now < 40 or 40 + well_s <= now < 90 else seconds  # noqa: E731
    assert Stage({"a": a}, options=options(places(most, "a"))).play(make_samples(count)).all_scored


def test_a_moment_of_503_does_not_keep_a_slow_judge_from_its_places():
    rng = random.Random(1)
    a = lambda number, request, now: BROKEN if now % 60.0 >= 55.0 else 30.0 * rng.uniform(0.7, 1.3)  # noqa: E731
    played = Stage({"a": a}, options=options(places(64, "a"), total_s=200)).play(make_samples(640))
    assert played.all_scored
    assert played.finished_s < 400.0


@pytest.mark.parametrize(("count", "most", "seed"), [(200, 16, 0), (200, 16, 1), (200, 16, 2), (60, 8, 0)])
def test_a_few_samples_that_always_fail_are_given_up_soon_and_taken_for_no_outage(count, most, seed):
    rng = random.Random(seed)
    bad = set(rng.sample(range(count), 6))
    samples = [
        make_sample(number, response=(f"{POISON} " if number in bad else "") + "x" * rng.randrange(300))
        for number in range(count)
    ]
    played = Stage({"a": poison_is(BROKEN)}, options=options(places(most, "a"))).play(samples)
    assert labels(played.outcomes[number] for number in range(count) if number not in bad) == {"scored"}
    failed = [played.outcomes[number] for number in bad]
    assert {(outcome.label, "503" in outcome.detail) for outcome in failed} == {("infra/exhausted", True)}
    assert played.finished_s < 30.0  # an outage would be probed for minutes
    for good in (0, 30):
        stage = Stage({"a": poison_is(BROKEN, others=0.1)}, options=options(max_attempts=4))
        alone = stage.play(poisoned(1) + make_samples(good)).outcomes[0]
        assert (alone.label, alone.attempts) == ("infra/exhausted", 4)


def test_samples_that_always_fail_and_go_last_do_not_hold_the_batch():
    """Nobody whose failure could tell more than theirs is left, so answers to older requests count."""
    rng = random.Random(1)
    a = lambda number, request, now: BROKEN if is_poison(request) else 4.0 * rng.uniform(0.6, 1.5)  # noqa: E731
    bad = [make_sample(number, response=POISON) for number in range(5)]
    good = [make_sample(number, response="x" * 100) for number in range(5, 64)]
    played = Stage({"a": a}, options=options(places(16, "a"))).play(bad + good)
    assert labels(played.outcomes[5:]) == {"scored"}
    assert played.finished_s < 40.0


@pytest.mark.parametrize(("most", "usual_s", "share", "finished_s"), [(32, 4.0, 0.6, 350.0), (16, 1.0, 0.5, 130.0)])
def test_a_source_that_fails_every_second_request_is_used_none_the_less(most, usual_s, share, finished_s):
    rng = random.Random(1)
    a = lambda number, request, now: BROKEN if rng.random() < share else usual_s * rng.uniform(0.6, 1.4)  # noqa: E731
    played = Stage({"a": a}, options=options(places(most, "a"))).play(make_samples(500))
    assert played.finished_s < finished_s


# Hangs


@pytest.mark.parametrize("usual_s", [0.2, 4.0])
def test_a_source_that_hangs_is_noticed_long_before_its_time_limit_and_used_again(usual_s):
    since_s, until_s = 6.0 * usual_s, 6.0 * usual_s + 30.0

    def a(number, request, now):
        return NEVER_S if since_s <= now < until_s else usual_s

    stage = Stage({"a": a, "b": usual_s}, options=options(places(10), total_s=600, max_attempts=2))
    played = stage.play(make_samples(int(20 * (60.0 / usual_s + 20))))
    assert played.all_scored
    assert played.statistics.sources["a"].timeouts == 0
    in_outage = [each.at for each in stage.sent if each.source == "a" and since_s + 15 < each.at < until_s]
    assert len(in_outage) <= 10
    assert played.shares["a"] > 0.2 * played.shares["b"]


def test_a_source_that_has_never_answered_is_not_waited_for_while_another_one_answers():
    def plays(count, others_places=30, **sources):
        limits = {**places(others_places, sources), **places(30, "a")}
        stage = Stage(sources, options=options(limits, total_s=600, max_attempts=2))
        played = stage.play(make_samples(count))
        assert played.all_scored
        return played, stage.sent_by_source["a"]

    loads = lambda number, request, now: max(0.0, 100.0 - now) + 1.0  # noqa: E731
    for a in (hangs, loads):
        played, sent = plays(60, a=a, b=1.0)
        assert played.finished_s < 45.0
        assert sent <= 40
    played, sent = plays(6000, a=loads, b=1.0)
    assert played.shares["a"] > 1000  # once it answers, it is used like the other one
    # There is no other, or it needs about as long for one sample, or for all that wait for this one.
    for others_places, others in ((30, {}), (30, {"b": 20.0}), (30, {"b": hangs}), (1, {"b": 2.0})):
        played, sent = plays(60, others_places, a=loads, **others)
        assert played.shares["a"] == sent


def test_a_source_that_became_slow_is_not_taken_for_dead():
    """Its attempts are given up once, and not again and again until their samples have no tries left."""
    cases = ((4, 4.0, False), (4, 20.0, False), (20, 10.0, False), (40, 10.0, False), (40, 40.0, True))
    for count, factor, hedge in cases:
        slow = lambda number, request, now, count=count, factor=factor: 1.0 if number < 5 * count else factor  # noqa: E731
        stage = Stage({"a": slow}, options=options(places(count, "a"), total_s=300, scheduling={"hedge": hedge}))
        played = stage.play(make_samples(15 * count))
        assert played.all_scored
        assert len(stage.sent) < 18 * count
        assert played.finished_s < 5 + 12 * factor + 10


def test_a_source_that_became_slow_is_used_beside_another_one():
    slow = lambda number, request, now: 1.0 if number < 200 else 10.0  # noqa: E731
    limits = {**places(40, "a"), **places(4, "b")}
    played = Stage({"a": slow, "b": 1.0}, options=options(limits, total_s=300)).play(make_samples(1000))
    assert played.all_scored
    assert played.shares["a"] > 400
    assert played.finished_s < 150.0


def test_a_probe_of_a_source_that_hangs_leaves_its_sample_half_its_time():
    stage = Stage({"a": hangs, "b": 1.0}, options={"limits": {**places(30, "a"), **places(4, "b")}, "total_s": 300})

    async def main(engine):
        calls = [asyncio.ensure_future(engine.score_all(sized(1_000_000, 1500), deadline_s=3000.0))]
        for number in range(12):
            await asyncio.sleep(20.0 if number else 3.0)
            calls.append(asyncio.ensure_future(engine.score_all(sized(1000 * number, 8), deadline_s=60.0)))
        return [outcome for outcomes in await asyncio.gather(*calls) for outcome in outcomes]

    assert labels(stage.run(main)) == {"scored"}


def test_a_source_that_hangs_again_and_again_is_noticed_as_soon_each_time():
    rng = random.Random(1)
    a = lambda number, request, now: 2.0 * rng.uniform(0.7, 1.3) if now % 25.0 < 5.0 else NEVER_S  # noqa: E731
    played = Stage({"a": a}, options=options(places(40, "a"), total_s=60)).play(make_samples(1500))
    assert played.all_scored
    assert played.finished_s < 1000.0


def test_a_slow_source_is_not_given_up_for_one_whose_rate_is_used_up():
    limits = {**places(40, "a"), "b": {"requests_per_minute": 30}}
    stage = Stage({"a": 60.0, "b": 0.5}, options=options(limits, total_s=120))
    assert stage.play(make_samples(120)).finished_s < 150.0


# Garbage, refusals and floors

FLOOR = {"on_invalid": "floor"}


def nonsense(request):
    return Reply(text="I would say seven", model="m")


def judged(request):
    return nonsense(request) if is_poison(request) else scored_text(request)


def test_a_source_of_garbage_rests_where_another_one_is_fine_and_nowhere_else():
    def both(request):
        return nonsense(request) if sent_to(request) == "a" else scored_text(request)

    stage = Stage(options=options())
    sent_to = lambda request: next(each.source for each in reversed(stage.sent) if each.id == request.sample.id)  # noqa: E731
    stage.sources, stage.answer = {"a": 1.0, "b": 1.0}, both
    stage.options = options(places(5))
    played = stage.play(make_samples(200))
    assert played.all_scored
    assert played.shares == {"b": 200}
    assert stage.sent_by_source["a"] < 30

    stage = Stage({"a": 1.0, "b": 1.0}, answer=nonsense, options=options(places(5)))
    played = stage.play(make_samples(100))
    assert len(stage.sent) == 400  # four tries each, as if nothing were wrong with the sources
    assert sum(outcome.label == "infra/garbage" for outcome in played.outcomes) >= 75
    assert played.rewards == [None] * 100


@pytest.mark.parametrize("attackers", [1, 12, 31])
def test_who_provokes_invalid_replies_or_a_refusal_gets_the_floor_however_many_come_together(attackers):
    refused = PermanentError("answered 413: too long", status=413)
    for concurrency, behaviour, label in (
        (1, 1.0, "verdict/invalid"),
        (32, 1.0, "verdict/invalid"),
        (4, poison_is(refused), "verdict/refused"),
    ):
        stage = Stage({"a": behaviour}, answer=judged, options=options(places(concurrency, "a"), judge=FLOOR))
        played = stage.play(poisoned(attackers) + make_samples(40 - attackers))
        got = {(outcome.failure.label, outcome.reward) for outcome in played.outcomes[:attackers]}
        assert got == {(label, 0.0)}
        assert labels(played.outcomes[attackers:]) == {"scored"}


def test_an_invalid_reply_that_says_nothing_ends_as_soon_as_any():
    stage = Stage({"a": poison_is(InvalidReply(""))}, options=options(places(4, "a")))
    played = stage.play(poisoned(1) + make_samples(10))
    assert [labels(played.outcomes[:1]), labels(played.outcomes[1:])] == [{"verdict/invalid"}, {"scored"}]
    assert played.finished_s < 60.0


def test_a_judge_that_cannot_judge_gives_nobody_a_floor():
    for behaviour, answer, label in (
        (1.0, nonsense, "infra/garbage"),
        (fails(PermanentError("answered 400: no model", status=400)), scored_text, "infra/no_source"),
    ):
        stage = Stage({"a": behaviour}, answer=answer, options=options(places(8, "a"), judge=FLOOR))
        assert labels(stage.play(make_samples(40)).outcomes) == {label}


@pytest.mark.parametrize(("rest_s", "reward"), [(0.3, 0.0), (590.0, 0.0), (700.0, None)])
def test_a_refusal_soon_after_answers_to_others_gets_the_floor(rest_s, reward):
    stage = Stage({"a": poison_is(PermanentError("answered 413", status=413))}, options=options(judge=FLOOR))

    async def main(engine):
        await engine.score_all(make_samples(50))
        await asyncio.sleep(rest_s)
        return await engine.score(poisoned(1)[0], deadline_s=60.0)

    assert stage.run(main).reward == reward


def test_who_is_to_blame_is_decided_at_the_deadline_at_the_latest():
    stage = Stage(
        {"a": lambda number, request, now: 0.1 if is_poison(request) else NEVER_S},
        answer=judged,
        options=options(places(2, "a"), judge=FLOOR, total_s=600, deadline_s=20.0),
    )
    played = stage.play(poisoned(2) + make_samples(2))
    assert [outcome.failure.label for outcome in played.outcomes[:2]] == ["verdict/invalid"] * 2
    assert labels(played.outcomes[2:]) == {"infra/deadline"}
    assert played.finished_s == 20.0


def test_a_refused_key_takes_a_source_out_for_everybody_until_it_answers(caplog):
    key = SourceUnusable("answered 401", status=401)
    stage = Stage({"a": down_until(30.0, key), "b": 0.5}, options=options(places(4)))
    assert stage.play(make_samples(40)).shares == {"b": 40}
    assert stage.sent_by_source["a"] < 25

    stage = Stage({"a": down_until(30.0, key)}, options=options(places(8, "a")))

    async def main(engine):
        took = []
        for at in (0.0, 20.0, 40.0):
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            outcomes = await engine.score_all(make_samples(40))
            took.append((labels(outcomes), asyncio.get_running_loop().time() - at))
        return took

    first, second, third = stage.run(main)
    assert first[0] == second[0] == {"infra/no_source"}
    assert max(first[1], second[1]) < 10.0
    assert third[0] == {"scored"}
    assert "source a is unusable" in caplog.text
    assert "source a answers again" in caplog.text


# Bugs, of functions and of ours


@pytest.mark.parametrize("times", [1, 10**6])
def test_what_something_else_cancels_has_failed_and_is_asked_again(times):
    class Cancels(SimulatedSource):
        async def send(self, request, *, on_sent):
            if len(self.arrivals) < times:
                self.arrivals.append(0.0)
                on_sent()
                asyncio.current_task().cancel()
                await asyncio.sleep(1)
            return await super().send(request, on_sent=on_sent)

    source = Cancels("a", answer=scored_text)
    (outcome,) = Stage({"a": source}, options=options(deadline_s=300.0)).play(make_samples(1)).outcomes
    assert isinstance(outcome, Scored) == (times == 1)
    assert times == 1 or "cancelled by another task" in outcome.detail


def test_an_attempt_that_takes_far_too_long_is_started_again_a_few_times():
    stage = Stage({"a": poison_is(200.0, others=0.5)}, options=options(places(2, "a"), total_s=600))

    async def main(engine):
        await engine.score_all(make_samples(40))
        return await engine.score_all(poisoned(1))

    (outcome,) = stage.run(main)
    assert outcome.verdict.attempts == 1 + MAX_RESTARTS


def test_a_bug_of_ours_on_one_sample_costs_that_sample_only(monkeypatch, caplog):
    reserve = Upstream.reserve

    def broken(self, request, now, **more):
        if is_poison(request):
            raise RuntimeError("a bug")
        return reserve(self, request, now, **more)

    monkeypatch.setattr(Upstream, "reserve", broken)
    played = Stage({"a": 0.5}, options=options()).play(poisoned(1) + make_samples(5))
    assert [labels(played.outcomes[:1]), labels(played.outcomes[1:])] == [{"infra/bug"}, {"scored"}]
    assert "this is a bug" in caplog.text


def test_the_last_try_goes_to_another_source():
    """Half of what the fast source is asked fails, and it used up all tries of some samples beside a healthy one."""
    half = lambda number, request, now: BROKEN if number % 5 < 3 else 0.5  # noqa: E731
    stage = Stage({"a": half, "b": 1.0}, options=options(places(4), max_attempts=3, deadline_s=300))
    assert stage.play(make_samples(100)).all_scored


@pytest.mark.parametrize(("pause_s", "count", "seed"), [(120.0, 10, 2), (300.0, 5, 1), (300.0, 10, 0)])
def test_samples_that_get_a_429_with_a_long_pause_take_no_source_from_the_others(pause_s, count, seed):
    """The pause is probed by one request at a time, and not by these again and again (promise P11)."""
    throttled = Throttled("answered 429", status=429, retry_after_s=pause_s)
    bad = {f"sample-{number}" for number in random.Random(seed).sample(range(1000), count)}
    stage = Stage({"a": lambda number, request, now: throttled if request.sample.id in bad else 3.0})
    stage.options = {"limits": places(64, "a"), "engine": {"deadline_s": 300}}
    samples = make_samples(1000)
    outcomes = zip(samples, stage.play(samples).outcomes, strict=True)
    assert [sample.id for sample, outcome in outcomes if not isinstance(outcome, Scored) and sample.id not in bad] == []


def test_429s_of_a_server_whose_places_cancelled_requests_keep_refuse_nobody():
    """It accepts nothing from the others because it still works on what hung, not for what they are."""
    held = [0.0, 0.0]

    def two_places(number, request, now):
        free = next((place for place, until in enumerate(held) if until <= now), None)
        if free is None:
            return Throttled("over its concurrency", status=429)
        held[free] = now + (600.0 if is_poison(request) else 1.0)
        return NEVER_S if is_poison(request) else 1.0

    played = Stage({"a": two_places}, options=options(max_attempts=2)).play(poisoned(1) + make_samples(9))
    assert labels(played.outcomes[1:]) == {"scored"}


# A user's function that hangs on some samples, or dies of them: the others are scored


FUNCTION = """
import asyncio, os, time


def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str.startswith("hang"):
        time.sleep(1000)
    if solution_str.startswith("crash"):
        os._exit(3)
    if solution_str.startswith("late"):
        raise TimeoutError("too late")
    return 1.0


async def wait(data_source, solution_str, ground_truth, extra_info):
    if solution_str.startswith("hang"):
        await asyncio.sleep(1000)
    return 1.0
"""


def config(tmp_path, *, name="score", **source):
    path = tmp_path / "reward.py"
    path.write_text(FUNCTION)
    timeouts = {"total_s": 1.0}
    return {
        "sources": {"f": {"kind": "function", "function": f"{path}:{name}", "timeouts": timeouts, **source}},
        "judges": {"j": {"kind": "function"}},
        "engine": {"deadline_s": 60, "seed": 1},
    }


def samples(kind, bad, good):
    """The bad ones are the longest, so that they go first."""
    said = [f"{kind} " + "x" * 500] * bad + ["fine"] * good
    return [Sample([{"role": "user", "content": "?"}], response) for response in said]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "reason", "options"),
    [
        ("hang", "hung", {"workers": 1}),
        ("crash", "crashed", {"workers": 1}),
        ("crash", "crashed", {"workers": 2}),
        ("late", "exhausted", {"workers": 1}),
        ("hang", "hung", {"name": "wait", "limits": {"concurrency": 1}}),
    ],
)
async def test_samples_that_hang_or_crash_a_function_cost_only_themselves(tmp_path, kind, reason, options):
    async with RewardEngine(config(tmp_path, **options)) as engine:
        outcomes = await engine.score_all(samples(kind, 3, 60))
        source = engine.statistics().sources["f"]
    assert all(isinstance(outcome, Scored) for outcome in outcomes[3:])
    assert [outcome.reason for outcome in outcomes[:3]] == [reason] * 3
    # One that raised a time-out before anybody was answered is not blamed for that yet. A call that hung for its whole
    # time limit is not tried again.
    attempts = {"late": {2, 3}, "hang": {1}, "crash": {2}}[kind]
    assert {outcome.attempts for outcome in outcomes[:3]} <= attempts
    assert source.state == "up"


BESIDE = """
import os

def score(solution_str, **_):
    import beside_the_reward
    return beside_the_reward.VALUE if solution_str == "fine" else os._exit(3)
"""


@pytest.mark.anyio
async def test_a_chdir_changes_nothing_later(tmp_path, monkeypatch):
    """Workers start late, and are replaced. Both the file and what it imports are those of the constructor."""
    for folder, value, right in (("a", 0.25, "fine"), ("b", 9.0, "none")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(BESIDE.replace("fine", right))
        (tmp_path / folder / "beside_the_reward.py").write_text(f"VALUE = {value}\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path / "a")
    tree = config(tmp_path, workers=1)
    tree["sources"]["f"]["function"] = "reward.py:score"

    async with RewardEngine(tree) as engine:
        os.chdir(tmp_path / "b")
        given = [Sample([{"role": "user", "content": "?"}], response) for response in ("fine", "crash", "fine")]
        rewards = [(await engine.score(sample)).reward for sample in given]
    assert rewards == [0.25, None, 0.25]
