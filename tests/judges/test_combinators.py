"""Gates, cascades, panels, and sums with optional parts and scheduled weights: whom they ask, and what comes of it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from qreward_plugins.config import load_config
from qreward_plugins.engine import RewardEngine
from qreward_plugins.errors import ConfigurationError
from qreward_plugins.judges import Judge, JudgeFailed, JudgeRouter
from qreward_plugins.samples import Cause, Failed, Sample, Verdict
from qreward_plugins.scheduling import Answer, CallFailed, Unanswered
from qreward_plugins.simulation import run

from ..kit import asked, each_of

SAMPLE = Sample([{"role": "user", "content": "?"}], "yes", step=250)
DOWN = Unanswered("deadline", "no answer", source="f")
FLOOR = Verdict(0.0, basis="floor", failure=Failed(Cause.POLICY, "empty", "nothing there"))


LLM = {"kind": "llm", "sources": "m"}


def opened(**judges: Any) -> Judge:
    """The judge `whole` of a configuration in which `a` to `d` are functions."""
    leaves = {name: {"kind": "function", "reward_range": [0, 1], "correct_at": 0.5} for name in "abcd"}
    model = {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "m"}
    tree = {"sources": {"f": {"kind": "function", "function": "m:f"}, "m": model}, "judges": {**leaves, **judges}}
    return JudgeRouter(load_config({**tree, "routes": {"*": "whole"}}), key=b"a key that nobody knows").judges["whole"]


GATE = {"kind": "gate", "when": "a", "at_least": 0.5, "then": "b"}


@each_of(
    ("keys", "says", "order", "score", "correct", "passed"),
    [
        ({}, {"a": 0.5, "b": 0.9}, "ab", 0.9, True, 1),
        ({}, {"a": 0.4}, "a", 0.0, False, 0),
        ({"otherwise": "c"}, {"a": 0.4, "c": 0.8}, "ac", 0.8, False, 0),
        ({"then": "a"}, {"a": 0.7}, "a", 0.7, True, 1),
        ({"otherwise": "a"}, {"a": 0.25}, "a", 0.25, False, 0),
    ],
)
def test_a_gate_asks_the_second_only_if_the_first_gives_enough(
    keys: Any, says: Any, order: str, score: float, correct: bool, passed: int
) -> None:
    verdict, names, _ = asked(opened(whole={**GATE, **keys}), **says)
    assert (verdict.score, names, verdict.correct) == (score, list(order), correct)
    assert verdict.components == {"passed": passed} | {
        name: value for name, value in says.items() if isinstance(value, float)
    }
    assert (verdict.basis, verdict.judge) == ("judged", "whole")


def test_a_gate_whose_condition_or_judge_fails_has_no_reward() -> None:
    judge = opened(whole=GATE)
    for says, part in (({"a": DOWN}, "a"), ({"a": 1.0, "b": DOWN}, "b")):
        failed, _, _ = asked(judge, **says)
        assert (failed.label, failed.detail, failed.judge) == ("infra/deadline", f"{part}: no answer", "whole")


def test_a_floor_at_a_gate_is_one_where_it_decides() -> None:
    judge = opened(whole=GATE)
    empty, _, _ = asked(judge, a=FLOOR)
    assert (empty.score, empty.basis, empty.failure.detail) == (0.0, "floor", "a: nothing there")
    late, _, _ = asked(judge, a=1.0, b=FLOOR)
    assert (late.basis, late.failure.detail) == ("floor", "b: nothing there")
    other, _, _ = asked(opened(whole={**GATE, "otherwise": "c"}), a=FLOOR, c=0.5)
    assert other.basis == "judged"


def stages(*early: Any, last: str = "c") -> dict[str, Any]:
    names = "ab"
    listed = [{"judge": names[place], "decides": decides} for place, decides in enumerate(early)]
    return {"kind": "cascade", "stages": [*listed, {"judge": last}]}


@each_of(
    ("early", "says", "order", "score"),
    [
        (["both"], {"a": 0.9}, "a", 0.9),
        (["positive"], {"a": 0.1, "c": 0.7}, "ac", 0.7),
        (["negative"], {"a": 0.9, "c": 0.2}, "ac", 0.2),
        ([{"above": 0.8, "below": 0.2}], {"a": 0.8}, "a", 0.8),
        ([{"above": 0.8, "below": 0.2}], {"a": 0.5, "c": 0.3}, "ac", 0.3),
        ([{"below": 0.2}, "positive"], {"a": 1.0, "b": 0.4, "c": 0.5}, "abc", 0.5),
        # What a stage cannot judge, the next one does.
        (["both"], {"a": DOWN, "c": 0.4}, "ac", 0.4),
        (["both"], {"a": FLOOR, "c": 0.4}, "ac", 0.4),
    ],
)
def test_the_first_sure_stage_of_a_cascade_decides(early: Any, says: Any, order: str, score: float) -> None:
    verdict, names, _ = asked(opened(whole=stages(*early)), **says)
    assert (verdict.score, "".join(names), verdict.basis) == (score, order, "judged")
    assert verdict.correct == (score >= 0.5)
    assert verdict.components["stage"] == len(early) + 1 if order[-1] == "c" else len(order)
    assert set(verdict.components) - {"stage"} == {name for name in order if not isinstance(says[name], Unanswered)}


def test_a_cascade_whose_last_stage_fails_has_no_reward() -> None:
    failed, order, _ = asked(opened(whole=stages("positive")), a=0.1, c=DOWN)
    assert (failed.detail, order) == ("c: no answer", ["a", "c"])


@each_of(
    ("keys", "says", "score", "disagreement"),
    [
        ({}, (0.25, 0.5, 0.75), 0.5, 0.5),
        ({"reduce": "median"}, (0.0, 0.25, 1.0), 0.25, 1.0),
        ({"reduce": "min"}, (0.25, 0.5, 0.75), 0.25, 0.5),
        ({"reduce": "majority"}, (0.0, 0.5, 0.75), 1.0, 0.75),
        ({"reduce": "majority"}, (0.0, 0.25, 0.75), 0.0, 0.75),
        ({"reduce": "majority", "quorum": 2}, (0.0, 1.0, DOWN), 0.5, 1.0),
        ({"quorum": 2}, (0.25, DOWN, 0.75), 0.5, 0.5),
        ({}, (0.25, DOWN, 0.75), None, None),
        ({"quorum": 2}, (DOWN, DOWN, 0.75), None, None),
    ],
)
def test_a_panel_reduces_the_rewards_of_its_members(keys: Any, says: Any, score: Any, disagreement: Any) -> None:
    said, order, at = asked(
        opened(whole={"kind": "panel", "judges": ["a", "b", "c"], **keys}), **dict(zip("abc", says, strict=True))
    )
    assert sorted(order) == ["a", "b", "c"]
    assert at == 1.0
    if score is None:
        assert isinstance(said, Failed)
        assert said.detail.endswith(": no answer")
        return
    assert (said.score, said.components["disagreement"]) == (score, disagreement)
    assert said.correct == ((score > 0.5) if keys.get("reduce") == "majority" else None)


def test_a_panel_without_spare_members_ends_with_the_first_failure() -> None:
    panel = {"kind": "panel", "judges": ["a", "b"]}
    assert asked(opened(whole=panel), a=(2.0, DOWN), b=(60.0, 1.0))[2] == 2.0
    assert asked(opened(whole={**panel, "quorum": 1}), a=(2.0, DOWN), b=(60.0, 1.0))[2] == 60.0


SCREEN = {"kind": "screen", "judge": "a", "monitor": "b", "at": 0.7}


@each_of(
    ("keys", "says", "result"),
    [
        ({}, {"a": 0.9, "b": 0.0}, 0.9),
        ({}, {"a": 0.9, "b": 0.7}, "policy/screened"),
        ({"flags": "below"}, {"a": 0.9, "b": 0.8}, 0.9),
        ({"flags": "below"}, {"a": 0.9, "b": 0.7}, "policy/screened"),
        ({"on": "floor"}, {"a": 0.9, "b": 0.8}, 0.0),
        ({}, {"a": 0.9, "b": DOWN}, 0.9),
        ({"closed": True}, {"a": 0.9, "b": DOWN}, "infra/deadline"),
        ({}, {"a": DOWN, "b": 0.0}, "infra/deadline"),
    ],
)
def test_a_screen_takes_out_what_its_monitor_flags(keys: Any, says: Any, result: Any) -> None:
    said, order, _ = asked(opened(whole={**SCREEN, **keys}), **says)
    assert sorted(order) == ["a", "b"]
    if isinstance(said, Failed):
        assert said.label == result
        assert said.detail in ("b gave 0.7", "b gave 0.8", "a: no answer", "b: no answer")
        return
    assert said.score == result
    assert said.components["screened"] == float(keys.get("on") == "floor")
    assert (said.basis, said.correct) == (("floor", False) if result == 0.0 else ("judged", True))


@each_of(
    ("whole", "says", "score", "at"),
    [
        (
            {"kind": "cascade", "stages": [{"judge": "a", "within_s": 2}, {"judge": "b"}]},
            {"a": (9.0, 1.0), "b": 0.5},
            0.5,
            3,
        ),
        ({"kind": "panel", "judges": ["a", "b"], "quorum": 1, "within_s": 2}, {"a": (9.0, 1.0), "b": 0.5}, 0.5, 2),
        (
            {"kind": "sum", "weights": {"a": {"optional": True, "within_s": 2}, "b": 1}},
            {"a": (9.0, 1.0), "b": 0.5},
            1.0,
            2,
        ),
        (
            {"kind": "sum", "weights": {"a": {"optional": True, "within_s": 2}, "b": 1}},
            {"a": 1.0, "b": (9.0, 0.5)},
            1.5,
            9,
        ),
    ],
)
def test_a_part_that_may_be_missing_is_waited_for_so_long(whole: Any, says: Any, score: float, at: float) -> None:
    said, _, ended = asked(opened(whole=whole), **says)
    assert (said.score, ended) == (score, at)


def weighted(**weights: Any) -> dict[str, Any]:
    return {"kind": "sum", "weights": weights}


def test_an_optional_part_that_fails_shares_its_weight_out() -> None:
    judge = opened(whole=weighted(a=0.5, b=0.25, c={"weight": 0.25, "optional": True}))
    whole, _, _ = asked(judge, a=1.0, b=0.0, c=1.0)
    without, _, at = asked(judge, a=(3.0, 1.0), b=0.0, c=DOWN)
    assert (whole.score, without.score, at) == (0.75, pytest.approx(0.5 / 0.75), 3.0)
    assert set(without.components) == {"a", "b"}
    assert asked(judge, a=1.0, b=DOWN, c=1.0)[0].detail == "b: no answer"


@each_of(("step", "score"), [(0, 1.0), (None, 1.0), (100, 1.0), (200, 0.75), (250, 0.625), (300, 0.5), (10**6, 0.5)])
def test_a_weight_follows_the_training_step(step: int | None, score: float) -> None:
    judge = opened(whole=weighted(a={"weight": {100: 1.0, 300: 0.5}}, b=0.5))
    assert asked(judge, step, a=1.0, b=0.0)[0].score == pytest.approx(score)
    assert judge.reward_range == (0.0, 1.5)


def test_a_bar_follows_the_training_step() -> None:
    judge = opened(whole={**weighted(a=1.0), "correct_at": {0: 0.2, 500: 0.8}})
    assert [asked(judge, step, a=0.5)[0].correct for step in (0, 240, 260, 900)] == [True, True, False, False]


OTHERS = {
    "wide": {"kind": "function", "reward_range": [-5, 0]},
    "floored": {"kind": "function", "reward_range": [0, 1], "on_invalid": "floor"},
    "deep": {"kind": "gate", "when": "a", "at_least": 0.5, "then": "floored"},
    "masks": SCREEN,
    "deep_masks": {"kind": "gate", "when": "a", "at_least": 0.5, "then": "masks"},
}


def test_a_screen_may_be_a_part_without_which_the_whole_has_no_reward() -> None:
    for whole in (
        weighted(a=1, masks=1),
        {"kind": "panel", "judges": ["a", "masks"]},
        stages("negative", last="masks"),
        {**SCREEN, "monitor": "masks", "closed": True},
        {**GATE, "when": "masks"},
    ):
        said, _, _ = asked(opened(whole=whole, **OTHERS), a=0.6, b=1.0)
        assert said.label == "policy/screened"


@each_of(
    ("whole", "place", "said"),
    [
        ({**GATE, "then": "x"}, "whole.then", "no such judge"),
        ({**GATE, "otherwise": "x"}, "whole.otherwise", "judge"),
        (stages("both", last="d") | {"stages": [{"judge": "a"}]}, "whole.stages", "2"),
        ({"kind": "cascade", "stages": [{"judge": "a"}, {"judge": "a"}]}, "whole.stages", "is a stage twice"),
        (stages({}), "whole.stages[0].decides", "name `above`, `below` or both"),
        (stages("yes"), "whole.stages[0].decides", "`positive`, `negative`, `both`, or a mapping"),
        (stages({"above": 0.1, "below": 0.2}), "whole.stages[0].decides", "must be less than above"),
        ({"kind": "panel", "judges": ["a", "a"]}, "whole.judges", "is a member twice"),
        ({"kind": "panel", "judges": ["a", "b"], "quorum": 3}, "whole", "above the number of members, 2"),
        ({"kind": "screen", "judge": "a", "monitor": "a", "at": 1}, "whole", "its own monitor"),
        ({**GATE, "at_least": 5}, "whole.at_least", "it never passes: the rewards of a are from 0 to 1"),
        ({**GATE, "at_least": 0}, "whole.at_least", "it always passes"),
        ({**SCREEN, "at": -1, "flags": "below"}, "whole.at", "it never flags"),
        (stages({"above": 9, "below": 0}), "whole.stages[0].decides.above", "it never decides"),
        ({"kind": "cascade", "stages": ["a", {"judge": "b", "within_s": 3}]}, "whole.stages", "for an earlier stage"),
        ({"kind": "panel", "judges": ["a", "b"], "correct_at": 1.5}, "whole.correct_at", "outside of the range"),
        ({"kind": "panel", "judges": ["a", "b"], "within_s": 2}, "whole", "this panel needs all"),
        (weighted(a={"weight": {5: 1, 3: 2}}), "whole.weights.a", "must ascend"),
        (weighted(a=-1, b={"optional": True}), "whole", "cannot be shared out"),
        (weighted(a={"optional": True}), "whole", "must not be optional"),
        (weighted(a={"within_s": 3}, b=1), "whole", "is for an optional part"),
        (weighted(a=1, wide={"optional": True}), "whole.weights.wide.optional", "ranges of the parts differ"),
        (weighted(a=1, floored=-1), "judges.floored.on_invalid", "Set `floor: 1`, or leave it out"),
        (weighted(a=1, deep={"weight": {0: 0, 9: -1}}), "judges.floored.on_invalid", "whole subtracts it"),
        # What goes on without a part must not have one that takes samples out.
        (weighted(a=1, masks={"optional": True}), "whole.weights.masks", "Put the screen around whole"),
        (stages("both") | {"stages": ["deep_masks", "a"]}, "whole.stages[0]", "Put the screen around whole"),
        ({"kind": "panel", "judges": ["a", "masks"], "quorum": 1}, "whole.judges", "takes samples out"),
        ({**SCREEN, "monitor": "masks"}, "whole.monitor", "takes samples out"),
    ],
)
def test_what_cannot_work_is_refused_with_its_place(whole: Any, place: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        opened(whole=whole, **OTHERS)
    assert any(place in mistake.path and said in str(mistake) for mistake in caught.value.mistakes), caught.value


def test_a_penalty_may_have_a_floor_that_is_the_full_penalty() -> None:
    floored = OTHERS["floored"] | {"floor": 1}
    assert opened(whole=weighted(a=1, floored=-1), floored=floored).reward_range == (-1.0, 1.0)


def test_who_has_no_vote_or_cannot_decide_is_refused() -> None:
    mute = {"kind": "function", "reward_range": [0, 1]}
    for whole, place in (
        ({"kind": "panel", "judges": ["a", "m"], "reduce": "majority"}, "judges.whole.reduce"),
        ({"kind": "cascade", "stages": [{"judge": "m"}, {"judge": "a"}]}, "judges.whole.stages[0].decides"),
    ):
        with pytest.raises(ConfigurationError, match=r"judge m defines no correctness") as caught:
            opened(whole=whole, m=mute)
        assert [mistake.path for mistake in caught.value.mistakes] == [place]
    named = {"kind": "function"}
    with pytest.raises(ConfigurationError, match="a part of it is named 'passed'"):
        opened(whole={**GATE, "then": "passed"}, passed=named)


def test_a_time_limit_ends_a_part_that_has_parts() -> None:
    """A time limit of anyio is delivered in each step of the event loop, in which a sum waits for its parts to end."""
    whole = {"kind": "sum", "weights": {"a": 1.0, "inner": {"weight": 1.0, "optional": True, "within_s": 2}}}
    inner = {"kind": "sum", "weights": {"b": 0.5, "c": 0.5}}
    verdict, _, at = asked(opened(whole=whole, inner=inner), a=0.5, b=(100.0, 1.0), c=(100.0, 1.0))
    assert (verdict.components["a"], at) == (0.5, 2.0)


@each_of(
    "whole",
    [
        GATE,
        {**GATE, "otherwise": "c"},
        stages("both"),
        {"kind": "panel", "judges": ["a", "b"]},
        {"kind": "screen", "judge": "a", "monitor": "b", "at": 1},
        weighted(a={"weight": {0: 1.0, 9: 0.5}}, b={"weight": 1, "optional": True}),
    ],
)
def test_a_configuration_that_was_read_can_be_read_again(whole: Any) -> None:
    """As every command does, which loads a file and makes an engine of it."""
    leaves = {name: {"kind": "function", "reward_range": [0, 1], "correct_at": 0.5} for name in "abc"}
    tree = {"sources": {"f": {"kind": "function", "function": "math:fsum"}}, "judges": {**leaves, "whole": whole}}
    engine = RewardEngine(load_config({**tree, "routes": {"*": "whole"}}))
    assert set(engine.config.judges) == {"a", "b", "c", "whole"}
    asyncio.run(engine.aclose())


IN_TURNS = dataclasses.replace(
    SAMPLE,
    response="assistant: a\n\ntool: b\n\nassistant: c",
    turns=[
        {"role": "assistant", "content": "a", "end": 12},
        {"role": "tool", "content": "b", "end": 21},
        {"role": "assistant", "content": "c", "end": 35},
    ],
)


def of_turns(judge: Judge, *said: Any) -> tuple[Any, list[Sample]]:
    """What a judge says if its leaf says this of one turn after the other, and the samples that the leaf saw."""
    seen: list[Sample] = []

    async def ask(call: Any) -> Any:
        seen.append(call.request(0).sample)
        answer = said[len(seen) - 1]
        await asyncio.sleep(1.0)
        if isinstance(answer, Unanswered):
            raise CallFailed(answer)
        return Answer(answer if isinstance(answer, Verdict) else Verdict(answer, components={"x": 2 * answer}), "f")

    async def main() -> Any:
        try:
            return await judge.judge(IN_TURNS, ask)
        except JudgeFailed as error:
            return error.failed

    return run(main()), seen


@each_of(
    ("keys", "score", "dense"),
    [
        ({}, 0.5, [(12, 0.125), (35, 0.375)]),
        ({"reduce": "sum"}, 1.0, [(12, 0.25), (35, 0.75)]),
        ({"reduce": "sum", "discount": 0.5}, 0.625, [(12, 0.25), (35, 0.375)]),
        ({"discount": 0.5}, 1.25 / 3, [(12, 0.5 / 3), (35, 0.75 / 3)]),
        ({"reduce": "last"}, 0.75, [(12, 0.25), (35, 0.5)]),
        ({"reduce": "min"}, 0.25, [(12, 0.25), (35, 0.0)]),
    ],
)
def test_each_turn_is_judged_on_what_was_said_before(keys: Any, score: float, dense: Any) -> None:
    verdict, seen = of_turns(opened(whole={"kind": "turns", "judge": "a", **keys}), 0.25, 0.75)
    assert [sample.response for sample in seen] == ["a", "c"]
    assert [[message["content"] for message in sample.messages] for sample in seen] == [["?"], ["?", "a", "b"]]
    assert seen[1].messages[2] == {"role": "tool", "content": "b"}
    assert verdict.score == pytest.approx(score)
    assert verdict.steps == ((12, 0.25), (35, 0.75))
    assert verdict.dense == tuple((end, pytest.approx(added)) for end, added in dense)
    assert verdict.components == {"turns": 2.0, "a": 0.5, "a/x": 1.0}


def test_a_turn_without_words_counts_as_one() -> None:
    """It ends where the one before it does."""
    silent = {"role": "assistant", "content": "", "end": 35}
    judge = opened(whole={"kind": "turns", "judge": "a"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.IN_TURNS", dataclasses.replace(IN_TURNS, turns=[*IN_TURNS.turns, silent]))
        verdict, seen = of_turns(judge, 0.25, 0.75, 0.5)
    assert (len(seen), verdict.score) == (3, 0.5)
    assert verdict.steps == ((12, 0.25), (35, 0.75), (35, 0.5))


def test_what_a_judge_of_turns_sees_goes_through_its_parts() -> None:
    tree = {
        "sources": {"f": {"kind": "function", "function": "m:f"}},
        "judges": {
            "a": {"kind": "function"},
            "both": {"kind": "sum", "weights": {"a": 1.0}},
            "whole": {"kind": "turns", "judge": "both"},
        },
    }
    router = JudgeRouter(load_config(tree), key=b"a key that nobody knows")
    assert [sample.response for sample in router.seen_by("a", IN_TURNS)] == ["a", "c"]
    assert router.seen_by("whole", IN_TURNS) == [IN_TURNS]


def test_a_response_of_one_turn_is_judged_as_it_is() -> None:
    verdict, names, _ = asked(opened(whole={"kind": "turns", "judge": "a"}), a=0.75)
    assert (names, verdict.score, verdict.dense) == (["a"], 0.75, ((3, 0.75),))


def test_without_a_score_of_each_turn_there_is_none() -> None:
    failed, _ = of_turns(opened(whole={"kind": "turns", "judge": "a"}), 0.25, DOWN)
    assert (failed.label, failed.detail) == ("infra/deadline", "a, turn 2: no answer")
    floor, _ = of_turns(opened(whole={"kind": "turns", "judge": "a"}), 0.5, FLOOR)
    assert (floor.score, floor.basis, floor.failure.detail) == (0.25, "floor", "turn 2: nothing there")


@each_of(
    ("whole", "says", "score", "dense"),
    [
        # What other judges add is at the end of the response.
        ({"kind": "sum", "weights": {"t": 0.5, "b": 2}}, {"a": 0.5, "b": 0.25}, 0.75, ((3, 0.25),)),
        # An optional part that is missing: the others share its weight.
        (
            {"kind": "sum", "weights": {"t": 1, "b": {"weight": 3, "optional": True}}},
            {"a": 0.5, "b": DOWN},
            2.0,
            ((3, 2.0),),
        ),
        ({"kind": "gate", "when": "b", "at_least": 0.2, "then": "t"}, {"a": 0.5, "b": 0.25}, 0.5, ((3, 0.5),)),
        ({"kind": "gate", "when": "t", "at_least": 0.2, "then": "b"}, {"a": 0.5, "b": 0.25}, 0.25, ()),
        ({"kind": "panel", "judges": ["t", "b"]}, {"a": 0.5, "b": 0.25}, 0.375, ()),
    ],
)
def test_judges_of_judges_pass_on_what_turns_add(whole: Any, says: Any, score: float, dense: Any) -> None:
    judge = opened(t={"kind": "turns", "judge": "a", "correct_at": 0.5}, whole=whole)
    verdict, _, _ = asked(judge, **says)
    assert (verdict.score, verdict.dense) == (pytest.approx(score), dense)


@each_of(
    ("keys", "problem"),
    [
        ({"discount": 0.5, "reduce": "min"}, "discount is for `mean` and `sum`"),
        ({"discount": 0}, "must be above 0"),
        ({"correct_at": 2}, "correct_at: 2 is outside of the range"),
        ({"judge": "best"}, "judge best compares siblings, whose turns do not match"),
    ],
)
def test_mistakes_of_turns(keys: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        opened(best={"kind": "rank", "judge": "e"}, e=LLM, whole={"kind": "turns", "judge": "a", **keys})
