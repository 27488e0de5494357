"""What statistics tell: a batch's report, the facts of outcomes, and how long short and long requests waited."""

from __future__ import annotations

import pytest

from qreward_plugins import Cause, Failed, Scored, Spent, Usage, Verdict
from qreward_plugins.observers.batch_report import BatchReport, Part
from qreward_plugins.observers.facts import Facts, summary

SCORED = Scored(Verdict(0.5, {"tone": 0.25}, judge="j", source="a", spent=Spent(2, Usage(10, 5), 1.5, 0.01)))
FAILED = Failed(Cause.INFRA, "deadline", judge="j", spent=Spent(3, latency_s=4.0))


PARTS = [
    Part("arrival", "", 3.0),
    Part("queue", "a", 2.0),
    Part("service", "a", 1.0),
    Part("quota", "b", 9.1),
    Part("straggler", "b", 4.0),
    Part("retry", "b", 0.6),
    Part("retry", "b", 0.5),
]


def test_a_report_says_which_part_of_which_source_is_to_blame():
    report = BatchReport(512, 512, 0, 512, 0, 20.2, tuple(PARTS))
    assert report.describe() == (
        "512 samples in 20.2 s; waited 14.2 s on b: 9.1 quota, 4.0 straggler, 1.1 retry; "
        "3.0 s: 3.0 arrival; 3.0 s on a: 2.0 queue, 1.0 service"
    )
    of_a, of_b = {"queue": 2.0, "service": 1.0}, {"quota": 9.1, "straggler": 4.0, "retry": 1.1}
    blame = {"none/arrival": 3.0, **{f"a/{k}": v for k, v in of_a.items()}, **{f"b/{k}": v for k, v in of_b.items()}}
    assert report.metrics() == pytest.approx({f"blame_s/{part}": seconds for part, seconds in blame.items()})


def test_every_outcome_has_the_same_keys():
    facts = Facts(["tone"], defines_correct=False)
    scored, failed = facts.of(SCORED), facts.of(FAILED)
    assert scored.keys() == failed.keys()
    assert (scored["score/tone"], failed["score/tone"]) == (0.25, None)
    assert (scored["failed"], scored["cause"]) == (0.0, "")
    assert (failed["failed"], failed["cause"], failed["attempts"]) == (1.0, "infra/deadline", 3.0)
    assert (scored["tokens"], scored["cost_usd"], scored["latency_s"], scored["source"]) == (15.0, 0.01, 1.5, "a")


def test_a_floor_is_no_failure():
    empty = Failed(Cause.POLICY, "empty", "the response is empty")
    told = Facts(["tone"], defines_correct=False).of(Scored(Verdict(0.0, basis="floor", failure=empty)))
    assert (told["failed"], told["floor"], told["cause"], told["score/tone"]) == (0.0, 1.0, "policy/empty", None)


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


def test_a_summary_counts_what_a_monitor_took_out_as_screened_and_not_as_failed():
    facts = Facts([], defines_correct=False)
    screened, floor = Failed(Cause.POLICY, "screened", source="a"), Failed(Cause.POLICY, "screened")
    outcomes = [SCORED, FAILED, screened, Scored(Verdict(0.0, basis="floor", failure=floor))]
    numbers = summary([facts.of(outcome, "math") for outcome in outcomes])
    assert (numbers["failed"], numbers["failed_rate"], numbers["data/math/failed_rate"]) == (1.0, 0.25, 0.25)
    assert (numbers["failed/policy"], numbers["screened_rate"], numbers["floor_rate"]) == (0.0, 0.5, 0.25)
    assert (numbers["floor/policy"], numbers["floor/verdict"]) == (1.0, 0.0)
    assert (numbers["reward/mean"], numbers["source_share/a"]) == (0.25, 1.0)


def test_rewards_are_told_with_their_spread_and_by_data_source():
    facts = Facts([], defines_correct=True)
    rows = [facts.of(Scored(Verdict(number / 10, correct=number > 5)), "math") for number in range(11)]
    rows += [facts.of(FAILED, "math"), facts.of(FAILED, "code"), facts.of(SCORED, None)]
    numbers = summary(rows)
    spread = {"mean": 0.5, "std": (sum((n / 10 - 0.5) ** 2 for n in range(11)) / 12) ** 0.5, "min": 0.0, "max": 1.0}
    spread |= {"p10": 0.1, "p50": 0.5, "p90": 0.9}
    assert {name: numbers[f"reward/{name}"] for name in spread} == pytest.approx(spread)
    by_source = {"math/reward": 0.5, "math/failed_rate": 1 / 12, "math/acc": 5 / 11, "code/failed_rate": 1.0}
    found = {name.removeprefix("data/"): value for name, value in numbers.items() if name.startswith("data/")}
    assert found == pytest.approx(by_source)


def test_a_group_is_flat_if_all_its_rewards_are_equal():
    facts = Facts([], defines_correct=False)
    rewards = {"flat": (0.5, 0.5, None), "spread": (0.5, 0.6), "lone": (1.0, None), "down": (None, None)}
    pairs = [(group, reward) for group, those in rewards.items() for reward in those]
    rows = [facts.of(FAILED if reward is None else Scored(Verdict(reward))) for _, reward in pairs]
    assert summary(rows, [group for group, _ in pairs])["flat_rate"] == 0.5
    assert "flat_rate" not in summary(rows)
    assert "flat_rate" not in summary(rows[-4:], "abcc")
