"""The arithmetic of a sum: what its parts' outcomes come to, and when that is certain."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from qreward_plugins.config import load_config
from qreward_plugins.errors import ConfigurationError
from qreward_plugins.judges import JudgeSum, Panel
from qreward_plugins.samples import Cause, Failed, Sample, Scored, Usage, Verdict

KEY = b"a key that no policy can see"
SOURCES = {
    "a": {"kind": "openai", "base_url": "http://a/v1", "model": "m"},
    "f": {"kind": "function", "function": "rules:score"},
}


def panel(judges: dict[str, Any], routes: dict[str, str] | None = None, **sources: Any) -> Panel:
    config = load_config({"sources": sources or SOURCES, "judges": judges, "routes": routes or {}})
    return Panel(config, key=KEY)


@pytest.fixture(scope="session")
def total() -> Callable[..., JudgeSum]:
    def build(weights: dict[str, float] | None = None, *, rules: Any = None, **keys: Any) -> JudgeSum:
        judges = {
            "quality": {"kind": "llm", "criteria": {"proof": "Is it proven?"}},
            "format": {"kind": "function", "components": ["tags"], **(rules or {})},
            "total": {"kind": "sum", "weights": weights or {"quality": 0.8, "format": 0.2}, **keys},
        }
        return panel(judges).sums["total"]

    return build


def scored(score: float, **fields: Any) -> Scored:
    return Scored(Verdict(score, **fields))


def test_rewards_are_weighted_and_added(total: Any) -> None:
    quality = scored(0.5, components={"proof": 0.25}, rationale="fair", source="a", model="m", attempts=2)
    form = scored(1.0, components={"tags": 1.0}, source="f", model="rules:score", latency_s=0.25)
    outcome = total().outcome({"format": form, "quality": quality})
    assert outcome.reward == pytest.approx(0.6)
    assert outcome == Scored(
        Verdict(
            outcome.reward,
            components={"quality": 0.5, "quality/proof": 0.25, "format": 1.0, "format/tags": 1.0},
            rationale="quality: fair",
            judge="total",
            source="a+f",
            model="m+rules:score",
            attempts=3,
            latency_s=0.25,
        )
    )
    assert total({"quality": 1.0, "format": -0.5}).outcome({"format": form, "quality": quality}).reward == 0.0


def test_components_are_known_beforehand_and_in_the_order_of_the_weights(total: Any) -> None:
    assert total().component_names() == ("quality", "quality/proof", "format", "format/tags")
    outcome = total({"format": 1, "quality": 1}).outcome(
        {"quality": scored(0.5, components={"proof": 1.0}), "format": scored(1.0, components={"tags": 0.0})}
    )
    assert tuple(outcome.verdict.components) == ("format", "format/tags", "quality", "quality/proof")


def test_what_was_spent_is_added_and_what_was_waited_is_not(total: Any) -> None:
    spent = {"attempts": 2, "usage": Usage(10, 5), "cost_usd": 0.1}
    outcome = total().outcome({"quality": scored(1, latency_s=3.0, **spent), "format": scored(1, **spent)})
    told = outcome.verdict
    assert (told.attempts, told.usage, told.latency_s, told.cost_usd) == (4, Usage(20, 10), 3.0, 0.2)


def test_sources_are_told_in_one_order_once_each(total: Any) -> None:
    for first, second in (("a", "b"), ("b", "a")):
        outcome = total().outcome({"quality": scored(1, source=first), "format": scored(1, source=second)})
        assert outcome.verdict.source == "a+b"
    outcome = total().outcome({"quality": scored(1, source="a"), "format": scored(1, source="a")})
    assert outcome.verdict.source == "a"


@pytest.mark.parametrize(("first", "second"), [*itertools.product([True, False], repeat=2)])
def test_it_is_cached_only_if_all_of_it_is(total: Any, first: bool, second: bool) -> None:
    outcome = total().outcome({"quality": scored(1, cached=first), "format": scored(1, cached=second)})
    assert outcome.verdict.cached == (first and second)


def test_correctness_is_the_sums_own(total: Any) -> None:
    parts = {"quality": scored(1.0, correct=True), "format": scored(0.5, correct=True)}
    assert total().outcome(parts).verdict.correct is None
    assert total(correct_at=0.9).outcome(parts).verdict.correct is True
    assert total(correct_at=0.91).outcome(parts).verdict.correct is False


def test_a_sum_of_decimal_weights_is_what_people_expect() -> None:
    judges = {name: {"kind": "function", "reward_range": [0, 1]} for name in "xyz"}
    weights = {"x": 0.7, "y": 0.2, "z": 0.1}
    made = panel({**judges, "t": {"kind": "sum", "weights": weights, "correct_at": 1.0}}).sums["t"]
    assert made.outcome({name: scored(1.0) for name in "xyz"}).verdict.correct is True  # type: ignore[union-attr]


def test_it_is_not_certain_before_all_parts_are_in(total: Any) -> None:
    assert total().outcome({}) is None
    assert total().outcome({"quality": scored(1)}) is None
    assert total().outcome({"quality": Failed(Cause.POLICY, "empty", floor=0.0)}) is None


def test_a_part_without_a_reward_decides_at_once_and_is_never_zero(total: Any) -> None:
    failed = Failed(Cause.INFRA, "deadline", "a had not answered", source="a", attempts=1, latency_s=5.0)
    for others in ({}, {"format": scored(1.0, attempts=1)}, {"format": Failed(Cause.POLICY, "empty", floor=1.0)}):
        outcome = total().outcome({"quality": failed, **others})
        assert isinstance(outcome, Failed)
        assert (outcome.cause, outcome.reason, outcome.reward) == (Cause.INFRA, "deadline", None)
        assert outcome.detail == "quality: a had not answered"
        assert (outcome.judge, outcome.source, outcome.latency_s) == ("total", "a", 5.0)
    assert total().outcome({"quality": failed, "format": scored(1.0, attempts=1)}).attempts == 2


def test_of_several_parts_without_a_reward_the_first_is_told(total: Any) -> None:
    parts = {"format": Failed(Cause.VERDICT, "invalid"), "quality": Failed(Cause.INFRA, "throttled")}
    assert total().outcome(parts).describe() == "infra failure (throttled): quality: throttled"


def test_floors_count_and_the_cause_stays(total: Any) -> None:
    empty = Failed(Cause.POLICY, "empty", "the response is empty", floor=-1.0)
    outcome = total({"quality": 0.5, "format": 2.0}).outcome({"quality": empty, "format": scored(0.25)})
    assert (outcome.cause, outcome.reason, outcome.reward) == (Cause.POLICY, "empty", 0.0)
    assert outcome.detail == "quality: the response is empty"
    invalid = Failed(Cause.VERDICT, "invalid", "no score", floor=0.5)
    outcome = total({"quality": 1.0, "format": 1.0}).outcome({"quality": empty, "format": invalid})
    assert (outcome.cause, outcome.reward) == (Cause.POLICY, -0.5)
    assert outcome.detail == "quality: the response is empty; format: no score"


@pytest.mark.parametrize("weights", [{"quality": 3e38, "format": 3e38}, {"quality": -3e38, "format": -3e38}])
def test_a_sum_that_is_no_number_is_a_failure(total: Any, weights: dict[str, float]) -> None:
    outcome = total(weights).outcome({"quality": scored(1.0), "format": scored(1.0)})
    assert (outcome.cause, outcome.reason, outcome.reward) == (Cause.VERDICT, "invalid", None)
    assert "too large" in outcome.detail


def test_a_bar_that_no_sum_can_reach_is_a_mistake(total: Any) -> None:
    for rules in ({"reward_range": [0, 1]}, {}):
        assert total(rules=rules, correct_at=0.0).name == "total"
    total({"quality": 1, "format": -1}, rules={"reward_range": [0, 2]}, correct_at=-2)
    total(correct_at=7)  # the rules may give any number
    for weights, bar in (({"quality": 0.8, "format": 0.2}, 1.1), ({"quality": 1, "format": -1}, -1.1)):
        with pytest.raises(ConfigurationError) as caught:
            total(weights, rules={"reward_range": [0, 1]}, correct_at=bar)
        assert [mistake.path for mistake in caught.value.mistakes] == ["judges.total.correct_at"]


# The judges together


def test_the_mistakes_of_all_judges_come_together() -> None:
    judges = {
        "x": {"kind": "llm", "instructions": "{{ respons }}"},
        "y": {"kind": "llm", "floor": 7},
        "t": {"kind": "sum", "weights": {"x": 1, "y": 1}},
    }
    with pytest.raises(ConfigurationError) as caught:
        panel(judges)
    assert [mistake.path for mistake in caught.value.mistakes] == ["judges.x.instructions", "judges.y.floor"]


def test_components_are_those_of_whoever_samples_go_to() -> None:
    judges = {
        "quality": {"kind": "llm", "criteria": {"proof": "?"}, "correct_at": 0.5},
        "format": {"kind": "function"},
        "total": {"kind": "sum", "weights": {"quality": 1, "format": 1}},
    }
    alone = panel(judges)
    assert alone.component_names() == ("quality", "quality/proof", "format")
    assert alone.correct_at == {}
    assert alone.judge_of(Sample([], "x")) is alone.sums["total"]
    routed = panel(judges, {"code": "quality", "*": "total"})
    assert routed.component_names() == ("proof", "quality", "quality/proof", "format")
    assert routed.correct_at == {"quality": 0.5}
    assert routed.judge_of(Sample([], "x", data_source="code")) is routed.judges["quality"]
    samples = [Sample([], "x", data_source=name) for name in ("code", "math", "math")]
    assert (routed.requests_of(samples), routed.most_requests) == (5, 2)
    assert (panel({"quality": {"kind": "llm"}}).requests_of(samples), alone.judges["format"].name) == (3, "format")
