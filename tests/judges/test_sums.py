"""The arithmetic of a sum: what its parts' verdicts come to, and what becomes of it when one of them has none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from qreward_plugins.config import load_config
from qreward_plugins.errors import ConfigurationError
from qreward_plugins.judges import Judge, JudgeFailed, JudgeRouter, SumJudge
from qreward_plugins.judges.base import Ask, together
from qreward_plugins.samples import Cause, Failed, Sample, Verdict
from qreward_plugins.scheduling import Unanswered
from qreward_plugins.simulation import run

from ..kit import asked, each_of

KEY = b"a key that no policy can see"
SOURCES = {
    "a": {"kind": "openai", "base_url": "http://a/v1", "model": "m"},
    "f": {"kind": "function", "function": "rules:score"},
}
SAMPLE = Sample([{"role": "user", "content": "?"}], "yes")


def router(judges: dict[str, Any], routes: dict[str, str] | None = None, **sources: Any) -> JudgeRouter:
    config = load_config({"sources": sources or SOURCES, "judges": judges, "routes": routes or {}})
    return JudgeRouter(config, key=KEY)


@pytest.fixture(scope="session")
def total() -> Callable[..., SumJudge]:
    def build(weights: dict[str, float] | None = None, *, rules: Any = None, **keys: Any) -> SumJudge:
        judges = {
            "quality": {"kind": "llm", "criteria": {"proof": "Is it proven?"}},
            "format": {"kind": "function", "components": ["tags"], **(rules or {})},
            "total": {"kind": "sum", "weights": weights or {"quality": 0.8, "format": 0.2}, **keys},
        }
        made = router(judges).judges["total"]
        assert isinstance(made, SumJudge)
        return made

    return build


def floor(score: float, reason: str = "empty", detail: str = "", cause: Cause = Cause.POLICY) -> Verdict:
    return Verdict(score, basis="floor", failure=Failed(cause, reason, detail))


def test_rewards_are_weighted_and_added(total: Any) -> None:
    quality = Verdict(0.5, components={"proof": 0.25}, rationale="fair", source="a", model="m")
    form = Verdict(1.0, components={"tags": 1.0}, source="f", model="rules:score")
    verdict = total().added({"format": form, "quality": quality})
    assert verdict.score == pytest.approx(0.6)
    assert verdict == Verdict(
        verdict.score,
        components={"quality": 0.5, "quality/proof": 0.25, "format": 1.0, "format/tags": 1.0},
        rationale="quality: fair",
        judge="total",
        source="a+f",
        model="m+rules:score",
    )
    assert total({"quality": 1.0, "format": -0.5}).added({"format": form, "quality": quality}).score == 0.0


def test_sources_are_told_in_one_order_once_each(total: Any) -> None:
    for first, second in (("a", "b"), ("b", "a"), ("a+b", "b")):
        verdict = total().added({"quality": Verdict(1, source=first), "format": Verdict(1, source=second)})
        assert verdict.source == "a+b"
    verdict = total().added({"quality": Verdict(1, source="a"), "format": Verdict(1, source="a")})
    assert verdict.source == "a"


@each_of(("first", "second"), [(True, True), (True, False), (False, True), (False, False)])
def test_it_is_cached_only_if_all_of_it_is(total: Any, first: bool, second: bool) -> None:
    verdict = total().added({"quality": Verdict(1, cached=first), "format": Verdict(1, cached=second)})
    assert verdict.cached == (first and second)


def test_correctness_is_the_sums_own(total: Any) -> None:
    parts = {"quality": Verdict(1.0, correct=True), "format": Verdict(0.5, correct=True)}
    assert total().added(parts).correct is None
    assert total(correct_at=0.9).added(parts).correct is True
    assert total(correct_at=0.91).added(parts).correct is False
    assert [total().defines_correct, total(correct_at=0.9).defines_correct] == [False, True]


def test_a_sum_of_decimal_weights_is_what_people_expect() -> None:
    judges = {name: {"kind": "function", "reward_range": [0, 1]} for name in "xyz"}
    weights = {"x": 0.7, "y": 0.2, "z": 0.1}
    made: Any = router({**judges, "t": {"kind": "sum", "weights": weights, "correct_at": 1.0}}).judges["t"]
    assert made.added({name: Verdict(1.0) for name in "xyz"}).correct is True


def test_of_several_parts_without_a_reward_at_the_same_time_the_first_is_told(total: Any) -> None:
    said, _, _ = asked(total(), format=Unanswered("invalid", invalid=True), quality=Unanswered("exhausted"))
    assert isinstance(said, Failed)
    assert said.describe() == "infra failure (exhausted): quality: exhausted"


def test_floors_count_and_the_sum_says_so(total: Any) -> None:
    empty = floor(-1.0, detail="the response is empty")
    verdict = total({"quality": 0.5, "format": 2.0}).added({"quality": empty, "format": Verdict(0.25)})
    assert (verdict.score, verdict.basis) == (0.0, "floor")
    assert (verdict.failure.label, verdict.failure.detail) == ("policy/empty", "quality: the response is empty")
    invalid = floor(0.5, "invalid", "no score", Cause.VERDICT)
    verdict = total({"quality": 1.0, "format": 1.0}).added({"quality": empty, "format": invalid})
    assert (verdict.failure.cause, verdict.score) == (Cause.POLICY, -0.5)
    assert verdict.failure.detail == "quality: the response is empty; format: no score"


@each_of("weights", [{"quality": 3e38, "format": 3e38}, {"quality": -3e38, "format": -3e38}])
def test_a_sum_that_is_no_number_is_a_failure(total: Any, weights: dict[str, float]) -> None:
    with pytest.raises(JudgeFailed, match="not finite in float32") as caught:
        total(weights).added({"quality": Verdict(1.0), "format": Verdict(1.0)})
    assert caught.value.failed.label == "verdict/invalid"


def nested(**keys: Any) -> JudgeRouter:
    return router(
        {
            "top": {"kind": "sum", "weights": {"inner": 2, "format": 1}, **keys},
            "inner": {"kind": "sum", "weights": {"quality": 0.5, "format": 0.5}},
            "quality": {"kind": "llm", "criteria": {"proof": "?"}},
            "format": {"kind": "function", "reward_range": [0, 1]},
        }
    )


def test_sums_of_sums_are_added_and_name_their_components_by_the_way_to_them() -> None:
    top: Any = nested().judges["top"]
    assert top.component_names() == ("inner", "inner/quality", "inner/quality/proof", "inner/format", "format")
    assert top.calls == 3
    said, _, _ = asked(top, quality=Verdict(1.0, components={"proof": 0.5}), format=0.5)
    assert said.score == pytest.approx(2 * 0.75 + 0.5)
    assert said.components == {
        "inner": 0.75,
        "inner/quality": 1.0,
        "inner/quality/proof": 0.5,
        "inner/format": 0.5,
        "format": 0.5,
    }
    said, _, at = asked(top, quality=Unanswered("exhausted", "500"), format=(9.0, 0.5))
    assert (said.detail, at) == ("inner: quality: 500", 1.0)


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
        router(judges)
    assert [mistake.path for mistake in caught.value.mistakes] == ["judges.x.instructions", "judges.y.floor"]


def test_a_part_whose_name_looks_like_a_component_of_another_is_a_mistake() -> None:
    whole = {"kind": "sum", "weights": {"x": 1, "x/proof": 1}}
    with pytest.raises(ConfigurationError, match="looks like a component of x, another part of t") as caught:
        router({"x": {"kind": "llm"}, "x/proof": {"kind": "llm"}, "t": whole})
    assert [mistake.path for mistake in caught.value.mistakes] == ["judges.x/proof"]


def test_components_are_those_of_whoever_samples_go_to() -> None:
    judges = {
        "quality": {"kind": "llm", "criteria": {"proof": "?"}, "correct_at": 0.5},
        "format": {"kind": "function"},
        "total": {"kind": "sum", "weights": {"quality": 1, "format": 1}},
    }
    alone = router(judges)
    assert alone.component_names() == ("quality", "quality/proof", "format")
    assert not alone.defines_correct
    assert alone.judge_of(Sample([], "x")) is alone.judges["total"]
    routed = router(judges, {"code": "quality", "*": "total"})
    assert routed.component_names() == ("proof", "quality", "quality/proof", "format")
    assert routed.defines_correct
    assert routed.judge_of(Sample([], "x", data_source="code")) is routed.judges["quality"]
    samples = [Sample([], "x", data_source=name) for name in ("code", "math", "math")]
    assert (routed.calls_of(samples), routed.most_calls) == (5, 2)
    assert (router({"quality": {"kind": "llm"}}).calls_of(samples), alone.judges["format"].name) == (3, "format")


# The parts run together


def test_a_part_that_is_cancelled_by_something_else_is_a_bug_and_ends_the_others() -> None:
    class Part(Judge):
        ended = False

        async def judge(self, sample: Sample, ask: Ask) -> Verdict:
            if self.name == "cancelled":
                raise asyncio.CancelledError
            try:
                await asyncio.sleep(100.0)
            finally:
                self.ended = True
            return Verdict(1.0)

    other = Part("other")

    async def main() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="judge cancelled was cancelled"):
            await together({each.name: each.judge(SAMPLE, None) for each in (Part("cancelled"), other)})  # type: ignore[arg-type]
        return loop.time()

    assert run(main()) == 0.0
    assert other.ended
