"""Sources that answer garbage: they are kept away from where another one is fine, and never where nobody is."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from qreward_plugins.errors import SourceUnusable, TransientError
from qreward_plugins.samples import Cause, Failed
from qreward_plugins.scheduling.breaker import FIRST_COOLDOWN_S
from qreward_plugins.sources.base import Reply


def bad(request):
    return Reply(text="bad")


def bad_until(at):
    """An answer that is garbage until `at`, by the clock of the running loop."""
    import asyncio

    return lambda request: Reply(text="bad" if asyncio.get_running_loop().time() < at else "1")


def test_a_source_of_garbage_rests_where_another_one_is_fine(stage, caplog):
    degraded = stage.add("a", limits={"concurrency": 5}, answer=bad)
    stage.add("b", limits={"concurrency": 5})
    played = stage.play([10] * 200)
    assert played.all_scored
    assert played.shares == {"b": 200}
    # The first of them before anybody could know, and after that a probe now and then.
    assert len(degraded.arrivals) < 30
    assert sum(at > 8 for at in degraded.arrivals) < 6
    assert "a gives mostly invalid replies" in caplog.text
    assert "b answers mostly" not in caplog.text


def test_a_probe_that_is_garbage_lengthens_the_rest(stage):
    degraded = stage.add("a", limits={"concurrency": 5}, answer=bad)
    stage.add("b", limits={"concurrency": 5})
    assert stage.play([10] * 600, deadline_s=900).all_scored
    probes = [at for at in degraded.arrivals if at > 9][:4]
    pauses = [after - before for before, after in itertools.pairwise(probes)]
    assert len(pauses) >= 2
    assert all(pause > 1.5 * FIRST_COOLDOWN_S for pause in pauses)
    assert pauses == sorted(pauses)


def test_a_source_that_answers_well_again_is_used_again(stage):
    stage.add("a", limits={"concurrency": 5}, answer=bad_until(10.0))
    stage.add("b", limits={"concurrency": 5})
    played = stage.play([10] * 400)
    assert played.all_scored
    assert played.shares["a"] > 100
    assert stage.upstreams["a"].breaker.closed
    assert not stage.upstreams["a"].health.degraded


def test_after_a_probe_that_was_well_the_garbage_from_before_is_forgotten(stage):
    import asyncio

    answered = []

    def answer(request):
        answered.append(asyncio.get_running_loop().time())
        return Reply(text="bad" if answered[-1] < 10.0 or len(answered) % 3 == 0 else "1")

    stage.add("a", limits={"concurrency": 5}, answer=answer)
    stage.add("b", limits={"concurrency": 5})
    stage.judge.invalid_retries = 5
    trips, trip = [], stage.upstreams["a"].breaker.trip
    stage.upstreams["a"].breaker.trip = lambda now: trips.append(now) or trip(now)
    played = stage.play([10] * 400)
    assert played.all_scored
    assert played.shares["a"] > 100
    assert max(trips) < 10.0


def test_where_everybody_answers_garbage_no_circuit_opens(stage):
    for name in "ab":
        stage.add(name, limits={"concurrency": 5}, answer=bad)
    played = stage.play([10] * 100)
    assert [upstream.breaker.closed for upstream in stage.upstreams.values()] == [True, True]
    # Two tries each, as if nothing were wrong with the sources; but it is said that something is.
    assert len(stage.sent) == 200
    assert played.finished_at < 60
    assert sum(outcome.cause is Cause.INFRA for outcome in played.outcomes) >= 75
    assert all(isinstance(outcome, Failed) and outcome.reward is None for outcome in played.outcomes)


def test_the_only_source_of_a_judge_does_not_rest(stage):
    source = stage.add("a", limits={"concurrency": 5}, answer=bad)
    stage.play([10] * 50)
    assert len(source.arrivals) == 100
    assert stage.upstreams["a"].breaker.closed


@pytest.mark.parametrize("state", ["unusable", "down"])
def test_an_alternative_that_cannot_serve_is_none(stage, state):
    source = stage.add("a", limits={"concurrency": 5}, answer=bad)
    error = SourceUnusable("its key was refused") if state == "unusable" else TransientError("refused")
    stage.add("b", behaviour=lambda *_: error)
    if state == "unusable":
        stage.upstreams["b"].health.mark_unusable("its key was refused", 0.0)
    else:
        for _ in range(5):
            stage.upstreams["b"].breaker.trip(0.0)
            stage.upstreams["b"].breaker.failed(0.0, probe=True, in_flight=0)
    stage.play([10] * 30, deadline_s=50)
    assert stage.upstreams["a"].breaker.closed
    assert len(source.arrivals) >= 30


def test_a_source_that_errs_now_and_then_does_not_rest(stage):
    rng = random.Random(2)
    stage.add("a", limits={"concurrency": 5}, answer=lambda request: Reply(text="bad" if rng.random() < 0.35 else "1"))
    stage.add("b", limits={"concurrency": 5})
    stage.judge.invalid_retries = 5
    trips = []
    stage.upstreams["a"].breaker.trip = lambda now: trips.append(now) or True
    assert stage.play([10] * 300).all_scored
    assert trips == []


def test_a_few_invalid_verdicts_at_first_are_no_reason(stage):
    answers = iter(["bad"] * 6)
    stage.add("a", limits={"concurrency": 1}, answer=lambda request: Reply(text=next(answers, "1")))
    stage.add("b", limits={"concurrency": 1})
    trips = []
    stage.upstreams["a"].breaker.trip = lambda now: trips.append(now) or True
    assert stage.play([10] * 60).all_scored
    assert trips == []


@pytest.mark.parametrize("quick_s", [0.005, 0.5])
def test_quick_invalid_replies_make_no_slow_valid_one_look_silent(stage, quick_s):
    """P11: 5% of the samples provoke them. The bound is ten rounds of 64 places at 20 s, less their part: 190 s."""
    source = stage.add("a", limits={"concurrency": 64})
    sent = []

    async def send(request, *, on_sent):
        on_sent()
        sent.append(request)
        provokes = request.size == 77
        await asyncio.sleep(quick_s if provokes else 20.0)
        return Reply(text="bad" if provokes else "1")

    source.send = send
    played = stage.play([77 if number % 20 == 7 else 10 for number in range(640)], deadline_s=2000.0)
    assert sum(isinstance(outcome, Failed) for outcome in played.outcomes) == 32
    # Each provoking sample is asked twice, the others once.
    assert len(sent) == 640 + 32
    assert played.finished_at <= 200.5


def test_a_slow_invalid_reply_makes_a_source_look_slower(stage):
    source = stage.add("a", limits={"concurrency": 1})
    asked = itertools.count()

    async def send(request, *, on_sent):
        on_sent()
        valid = next(asked) < 30
        await asyncio.sleep(1.0 if valid else 2.0)
        return Reply(text="1" if valid else "bad")

    source.send = send
    stage.play([10] * 35, deadline_s=500.0)
    assert stage.upstreams["a"].speed.mean_s > 1.0
