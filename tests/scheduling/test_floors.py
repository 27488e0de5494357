"""Who is to blame for a sample that no source judges, where the judge has a floor for what its response provoked."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins.errors import PermanentError
from qreward_plugins.samples import Cause, Scored
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply

ATTACK = 900
FLOOR = {Cause.VERDICT: 0.0}


def judged(request):
    return Reply(text="bad" if request.size == ATTACK else "1")


@pytest.mark.parametrize("attackers", [1, 10, 31, 36])
@pytest.mark.parametrize("size", [10, 950], ids=["longest", "shortest"])
@pytest.mark.parametrize("concurrency", [1, 4, 32])
def test_attackers_have_their_floor_however_many_come_together(stage, attackers, size, concurrency):
    stage.add("a", limits={"concurrency": concurrency}, answer=judged)
    stage.judge.floors = FLOOR
    played = stage.play([ATTACK] * attackers + [size] * (40 - attackers))
    assert {(outcome.failure.label, outcome.reward) for outcome in played.outcomes[:attackers]} == {
        ("verdict/invalid", 0.0)
    }
    assert all(isinstance(outcome, Scored) for outcome in played.outcomes[attackers:])


@pytest.mark.parametrize("floors", [{}, FLOOR])
def test_a_judge_that_cannot_judge_gives_nobody_a_floor(stage, floors):
    stage.add("a", limits={"concurrency": 8}, answer=lambda request: Reply(text="bad"))
    stage.judge.floors = floors
    played = stage.play([10] * 60)
    if floors:
        assert {(outcome.cause, outcome.reason) for outcome in played.outcomes} == {(Cause.INFRA, "garbage")}
    assert sum(outcome.cause is Cause.INFRA for outcome in played.outcomes) >= 40
    assert played.finished_at < 60


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize("attackers", [1, 12, 30])
@pytest.mark.parametrize("size", [10, 950], ids=["longest", "shortest"])
def test_a_response_that_the_judge_does_not_take_does_not_escape_the_floor(stage, status, attackers, size):
    error = PermanentError(f"answered {status}: too long", status=status)
    stage.add(
        "a", limits={"concurrency": 4}, behaviour=lambda n, request, now: error if request.size == ATTACK else 1.0
    )
    stage.judge.floors = FLOOR
    played = stage.play([ATTACK] * attackers + [size] * (40 - attackers))
    for outcome in played.outcomes[:attackers]:
        assert (outcome.failure.label, outcome.reward) == ("verdict/refused", 0.0)
        assert str(status) in outcome.failure.detail
    assert all(isinstance(outcome, Scored) for outcome in played.outcomes[attackers:])


@pytest.mark.parametrize(("rest_s", "reward"), [(0.3, 0.0), (590.0, 0.0), (700.0, None)])
def test_a_refusal_shortly_after_answers_to_others_gets_the_floor_whatever_comes_later(stage, rest_s, reward):
    error = PermanentError("answered 413: too long", status=413)
    stage.add("a", behaviour=lambda n, request, now: error if request.size == ATTACK else 1.0)
    stage.judge.floors = FLOOR

    async def main():
        dispatcher = stage.dispatcher()
        await asyncio.gather(*(dispatcher.score(stage.sample(), stage.judge, deadline_s=60) for _ in range(200)))
        await asyncio.sleep(rest_s)
        outcome = await dispatcher.score(stage.sample(ATTACK), stage.judge, deadline_s=60)
        await dispatcher.aclose()
        return outcome

    outcome = run(main())
    assert (outcome.reward if isinstance(outcome, Scored) else None) == reward
    if reward is None:
        assert outcome.label == "infra/no_source"


@pytest.mark.parametrize("floors", [{}, FLOOR])
def test_a_judge_that_takes_nothing_is_no_reason_for_a_floor(stage, floors):
    stage.add("a", limits={"concurrency": 4}, behaviour=lambda *_: PermanentError("answered 400: no model", status=400))
    stage.judge.floors = floors
    played = stage.play([10] * 40)
    assert {(outcome.cause, outcome.reason, outcome.reward) for outcome in played.outcomes} == {
        (Cause.INFRA, "no_source", None)
    }


def test_without_a_floor_what_is_refused_is_missing(stage):
    error = PermanentError("answered 413", status=413)
    stage.add("a", behaviour=lambda n, request, now: error if request.size == ATTACK else 1.0)
    played = stage.play([ATTACK] + [10] * 10)
    assert (played.outcomes[0].cause, played.outcomes[0].reward) == (Cause.INFRA, None)


def test_an_undecided_sample_is_decided_at_its_deadline_at_the_latest(stage):
    stage.add("a", limits={"concurrency": 2}, behaviour=lambda n, request, now: 0.1 if request.size == ATTACK else 1e9)
    stage.sources["a"].answer = judged
    stage.judge.floors = FLOOR
    played = stage.play([ATTACK] * 3 + [10] * 2, deadline_s=20)
    assert [outcome.failure.reason for outcome in played.outcomes] == ["invalid"] * 3 + ["deadline"] * 2
    assert played.finished_at == 20


def test_the_second_try_waits_for_a_busy_source_that_is_healthy(stage):
    stage.add("garbage", limits={"concurrency": 8}, answer=lambda request: Reply(text="bad"), behaviour=lambda *_: 0.05)
    stage.add("healthy", limits={"concurrency": 1}, behaviour=lambda *_: 3.0)
    stage.judge.floors = FLOOR
    played = stage.play([10] * 8)
    assert played.all_scored
    assert played.shares == {"healthy": 8}


def test_the_second_try_goes_back_where_the_other_source_is_gone(stage):
    answers = iter(["bad"])
    stage.add("a", limits={"concurrency": 1}, answer=lambda request: Reply(text=next(answers, "1")))
    stage.add("b", limits={"concurrency": 1}, behaviour=lambda *_: 1e9)
    stage.upstreams["b"].breaker.trip(0.0)
    played = stage.play([10])
    assert played.all_scored
    assert played.finished_at < 10
