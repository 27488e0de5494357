"""The facts of outcomes: the same keys for every sample, and what they tell together."""

from __future__ import annotations

import pytest

from qreward_plugins import Cause, Failed, Scored, Spent, Usage, Verdict
from qreward_plugins.observers.facts import Facts, summary

SCORED = Scored(Verdict(0.5, {"tone": 0.25}, judge="j", source="a", spent=Spent(2, Usage(10, 5), 1.5, 0.01)))
FAILED = Failed(Cause.INFRA, "deadline", judge="j", spent=Spent(3, latency_s=4.0))


def test_every_outcome_has_the_same_keys():
    facts = Facts(["tone"], defines_correct=False)
    scored, failed = facts.of(SCORED), facts.of(FAILED)
    assert scored.keys() == failed.keys()
    assert (scored["score/tone"], failed["score/tone"]) == (0.25, None)
    assert (scored["failed"], scored["cause"]) == (0.0, "")
    assert (failed["failed"], failed["cause"], failed["attempts"]) == (1.0, "infra/deadline", 3.0)
    assert (scored["tokens"], scored["cost_usd"], scored["latency_s"], scored["source"]) == (15.0, 0.01, 1.5, "a")


def test_components_and_correctness_that_turn_up_stay():
    facts = Facts([], defines_correct=False)
    assert "score/tone" not in facts.of(FAILED)
    assert facts.of(SCORED)["score/tone"] == 0.25
    assert facts.of(FAILED)["score/tone"] is None
    assert "acc" not in facts.of(FAILED)
    assert facts.of(Scored(Verdict(1.0, correct=True)))["acc"] == 1.0
    assert facts.of(FAILED)["acc"] is None


def test_who_was_not_judged_correct_or_wrong_is_neither():
    facts = Facts([], defines_correct=True)
    assert facts.of(Scored(Verdict(0.9, judge="style")))["acc"] is None, "another judge defines what is correct"
    assert facts.of(Failed(Cause.INFRA, "deadline", judge="exact"))["acc"] is None
    assert facts.of(floor(correct=False))["acc"] == 0.0, "an empty answer is wrong"
    assert facts.of(floor())["acc"] is None
    told = [facts.of(outcome) for outcome in (Scored(Verdict(1.0, correct=True)), Scored(Verdict(0.9, judge="style")))]
    assert summary(told)["acc"] == 1.0


def floor(**fields):
    empty = Failed(Cause.POLICY, "empty", "the response is empty")
    return Scored(Verdict(0.0, basis="floor", failure=empty, **fields))


def test_a_floor_is_no_failure_and_says_what_it_stands_in_for():
    facts = Facts(["tone"], defines_correct=False)
    told = facts.of(floor())
    assert (told["failed"], told["floor"], told["cause"], told["score/tone"]) == (0.0, 1.0, "policy/empty", None)
    assert (facts.of(SCORED)["floor"], facts.of(FAILED)["floor"]) == (0.0, 0.0)
    numbers = summary([told, facts.of(SCORED), facts.of(FAILED), facts.of(FAILED)])
    assert (numbers["failed_rate"], numbers["floor_rate"]) == (0.5, 0.25)
    assert (numbers["floor/policy"], numbers["floor/verdict"], numbers["failed/policy"]) == (1.0, 0.0, 0.0)
    assert numbers["score/tone"] == 0.25


def test_a_summary_counts_all_and_averages_what_was_scored():
    facts = Facts(["tone"], defines_correct=True)
    outcomes = [
        SCORED,
        FAILED,
        Failed(Cause.VERDICT, "invalid"),
        Scored(Verdict(1.0, {"tone": 0.75}, correct=True, source="b")),
    ]
    numbers = summary([facts.of(outcome) for outcome in outcomes])
    assert (numbers["samples"], numbers["failed"], numbers["failed_rate"]) == (4.0, 2.0, 0.5)
    assert [numbers[f"failed/{cause}"] for cause in ("infra", "verdict", "policy")] == [1.0, 1.0, 0.0]
    assert (numbers["source_share/a"], numbers["source_share/b"]) == (0.5, 0.5)
    assert (numbers["score/tone"], numbers["acc"]) == (0.5, 1.0)
    assert (numbers["latency_s/max"], numbers["latency_s/p50"]) == (4.0, 0.0)
    assert numbers["cost_usd"] == pytest.approx(0.01)
    assert numbers["attempts_mean"] == pytest.approx(1.25)


def test_nothing_has_no_summary():
    assert summary([]) == {}
