"""Judges of judges: sums, gates, cascades, panels, screens and turns, whom they ask, and what comes of it."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins.config import load_config
from qreward_plugins.judges import JudgeRouter
from qreward_plugins.samples import Cause, Failed, Sample, Verdict
from qreward_plugins.scheduling.calls import Unanswered

from ..kit import asked, each_of, mistakes_of

DOWN = Unanswered("deadline", "no answer", source="f")
FLOOR = Verdict(0.0, basis="floor", failure=Failed(Cause.POLICY, "empty", "nothing there"))


def opened(**judges):
    """The judge `whole` of a configuration in which `a` to `d` are functions, and `m` is one without correctness."""
    rated = {"kind": "function", "reward_range": [0, 1]}
    leaves = {**{name: {**rated, "correct_at": 0.5} for name in "abcd"}, "m": rated}
    model = {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "m"}
    tree = {"sources": {"f": {"kind": "function", "function": "m:f"}, "m": model}, "judges": {**leaves, **judges}}
    return JudgeRouter(load_config({**tree, "routes": {"*": "whole"}}), key=b"a key that nobody knows").judges["whole"]


GATE = {"kind": "gate", "when": "a", "at_least": 0.5, "then": "b"}


@each_of(
    ("keys", "says", "order", "score", "correct", "passed"),
    [
        ({}, {"a": 0.5, "b": 0.9}, "ab", 0.9, True, 1),
        ({}, {"a": 0.4}, "a", 0.0, False, 0),
        ({"then": "a"}, {"a": 0.7}, "a", 0.7, True, 1),
    ],
)
def test_a_gate_asks_the_second_only_if_the_first_gives_enough(keys, says, order, score, correct, passed):
    verdict, names, _ = asked(opened(whole={**GATE, **keys}), **says)
    assert (verdict.score, names, verdict.correct) == (score, list(order), correct)
    assert verdict.components == {"passed": passed, **says}
    assert (verdict.basis, verdict.judge) == ("judged", "whole")


@each_of(
    ("whole", "says", "part"),
    [
        (GATE, {"a": DOWN}, "a"),
        (GATE, {"a": 1.0, "b": DOWN}, "b"),
        ({"kind": "cascade", "stages": [{"judge": "a", "decides": "positive"}, "c"]}, {"a": 0.1, "c": DOWN}, "c"),
    ],
)
def test_without_the_judge_that_decides_there_is_no_reward(whole, says, part):
    failed, order, _ = asked(opened(whole=whole), **says)
    assert (failed.label, failed.detail, failed.judge) == ("infra/deadline", f"{part}: no answer", "whole")
    assert order == [*says]


def test_a_floor_at_a_gate_is_one_where_it_decides():
    said, _, _ = asked(opened(whole=GATE), a=1.0, b=FLOOR)
    assert (said.score, said.basis, said.failure.detail) == (0.0, "floor", "b: nothing there")


def stages(*early, last="c"):
    listed = [{"judge": name, "decides": decides} for name, decides in zip("ab", early, strict=False)]
    return {"kind": "cascade", "stages": [*listed, {"judge": last}]}


@each_of(
    ("early", "says", "order", "score"),
    [
        (["both"], {"a": 0.9}, "a", 0.9),
        (["positive"], {"a": 0.1, "c": 0.7}, "ac", 0.7),
        ([{"above": 0.8, "below": 0.2}], {"a": 0.8}, "a", 0.8),
        ([{"above": 0.8, "below": 0.2}], {"a": 0.5, "c": 0.3}, "ac", 0.3),
        # What a stage cannot judge, the next one does.
        (["both"], {"a": DOWN, "c": 0.4}, "ac", 0.4),
        (["both"], {"a": FLOOR, "c": 0.4}, "ac", 0.4),
    ],
)
def test_the_first_sure_stage_of_a_cascade_decides(early, says, order, score):
    verdict, names, _ = asked(opened(whole=stages(*early)), **says)
    assert (verdict.score, "".join(names), verdict.basis) == (score, order, "judged")
    assert verdict.correct == (score >= 0.5)
    assert verdict.components["stage"] == len(early) + 1 if order[-1] == "c" else len(order)
    assert set(verdict.components) - {"stage"} == {name for name in order if not isinstance(says[name], Unanswered)}


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
def test_a_panel_reduces_the_rewards_of_its_members(keys, says, score, disagreement):
    panel = opened(whole={"kind": "panel", "judges": ["a", "b", "c"], **keys})
    said, order, at = asked(panel, **dict(zip("abc", says, strict=True)))
    assert (sorted(order), at) == (["a", "b", "c"], 1.0)
    if score is None:
        assert said.detail.endswith(": no answer")
        return
    assert (said.score, said.components["disagreement"]) == (score, disagreement)
    assert said.correct == ((score > 0.5) if keys.get("reduce") == "majority" else None)


def test_a_panel_without_spare_members_ends_with_the_first_failure():
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
def test_a_screen_takes_out_what_its_monitor_flags(keys, says, result):
    said, order, _ = asked(opened(whole={**SCREEN, **keys}), **says)
    assert sorted(order) == ["a", "b"]
    if isinstance(said, Failed):
        assert said.label == result
        assert said.detail in ("b gave 0.7", "a: no answer", "b: no answer")
        return
    assert (said.score, said.components["screened"]) == (result, float(keys.get("on") == "floor"))
    assert (said.basis, said.correct) == (("floor", False) if result == 0.0 else ("judged", True))


OPTIONAL = {"a": {"optional": True}, "b": 1}


@each_of(
    ("whole", "a", "b", "score", "at"),
    [
        ({"kind": "cascade", "stages": [{"judge": "a", "within_s": 2}, {"judge": "b"}]}, (9.0, 1.0), 0.5, 0.5, 3),
        ({"kind": "panel", "judges": ["a", "b"], "quorum": 1, "within_s": 2}, (9.0, 1.0), 0.5, 0.5, 2),
        ({"kind": "sum", "weights": OPTIONAL}, 1.0, (9.0, 0.5), 1.5, 9),
    ],
)
def test_a_part_that_may_be_missing_is_waited_for_so_long(whole, a, b, score, at):
    said, _, ended = asked(opened(whole=whole), a=a, b=b)
    assert (said.score, ended) == (score, at)


def weighted(**weights):
    return {"kind": "sum", "weights": weights}


def test_an_optional_part_that_fails_shares_its_weight_out():
    judge = opened(whole=weighted(a=0.5, b=0.25, c={"weight": 0.25, "optional": True}))
    whole, _, _ = asked(judge, a=1.0, b=0.0, c=1.0)
    without, _, at = asked(judge, a=(3.0, 1.0), b=0.0, c=DOWN)
    assert (whole.score, without.score, at) == (0.75, pytest.approx(0.5 / 0.75), 3.0)
    assert set(without.components) == {"a", "b"}
    assert asked(judge, a=1.0, b=DOWN, c=1.0)[0].detail == "b: no answer"


def test_a_weight_and_a_bar_follow_the_training_step():
    judge = opened(whole=weighted(a={"weight": {100: 1.0, 300: 0.5}}, b=0.5))
    scores = {0: 1.0, None: 1.0, 100: 1.0, 200: 0.75, 250: 0.625, 300: 0.5, 10**6: 0.5}
    assert {step: asked(judge, step, a=1.0, b=0.0)[0].score for step in scores} == pytest.approx(scores)
    assert judge.reward_range == (0.0, 1.5)
    judge = opened(whole={**weighted(a=1.0), "correct_at": {0: 0.2, 500: 0.8}})
    assert [asked(judge, step, a=0.5)[0].correct for step in (0, 240, 260, 900)] == [True, True, False, False]


@each_of(
    ("whole", "reward", "correct"),
    [
        ({**weighted(a=0.1, b=0.7), "correct_at": 0.8}, 1.0, True),
        ({"kind": "panel", "judges": ["a", "b", "c"], "correct_at": 0.7}, 0.7, True),
        ({"kind": "cascade", "stages": [{"judge": "total", "decides": {"above": 0.8}}, "m"]}, 1.0, None),
    ],
)
def test_a_bar_is_reached_up_to_rounding(whole, reward, correct):
    """0.1 + 0.7 is less than 0.8, and the mean of 0.7, 0.7 and 0.7 less than 0.7."""
    said, order, _ = asked(opened(whole=whole, total=weighted(a=0.1, b=0.7)), **dict.fromkeys("abc", reward))
    assert "m" not in order
    assert said.correct == correct


OTHERS = {
    "wide": {"kind": "function", "reward_range": [-5, 0]},
    "floored": {"kind": "function", "reward_range": [0, 1], "on_invalid": "floor"},
    "around": {"kind": "panel", "judges": ["floored", "b"]},
    "wild": {"kind": "function"},
    "passed": {"kind": "function"},
    "masks": SCREEN,
    "best": {"kind": "rank", "judge": "e"},
    "e": {"kind": "llm", "sources": "m"},
}
TURNS = {"kind": "turns", "judge": "a"}


@each_of(
    ("whole", "place", "said"),
    [
        ({**GATE, "then": "x"}, "whole.then", "there is no judge `x`"),
        (stages({}), "whole.stages[0].decides", "name `above`, `below` or both"),
        ({"kind": "panel", "judges": ["a", "a"]}, "whole.judges", "is a member twice"),
        ({"kind": "panel", "judges": ["a", "b"], "quorum": 3}, "whole", "above the number of members, 2"),
        ({**GATE, "at_least": 5}, "whole.at_least", "it never passes: the rewards of a are from 0 to 1"),
        ({**SCREEN, "at": -1, "flags": "below"}, "whole.at", "it never flags"),
        ({**SCREEN, "judge": "wild", "on": "floor"}, "whole.on", "no reward range"),
        (stages({"above": 9, "below": 0}), "whole.stages[0].decides.above", "it never decides"),
        (weighted(a={"weight": {5: 1, 3: 2}}), "whole.weights.a", "must ascend"),
        (weighted(a=-1, b={"optional": True}), "whole", "cannot be shared out"),
        (weighted(a=1, wide={"optional": True}), "whole.weights.wide.optional", "ranges of the parts differ"),
        (
            weighted(a=1, floored={"weight": {0: 0, 9: -1}}),
            "judges.floored.on_invalid",
            "Set `floor: 1`, or leave it out",
        ),
        (weighted(a=1, around=-1), "judges.floored.on_invalid", "Set `floor: 1`, or leave it out"),
        ({**weighted(a=0.8, b=0.2), "correct_at": 1.1}, "whole.correct_at", "1.1 is outside of the range"),
        ({**weighted(a=1), "correct_at": {0: 0.5, 9: -0.1}}, "whole.correct_at", "-0.1 is outside of the range"),
        ({"kind": "panel", "judges": ["a", "b"], "correct_at": 1.5}, "whole.correct_at", "outside of the range"),
        ({**TURNS, "correct_at": 2}, "whole.correct_at", "2 is outside of the range"),
        # What goes on without a part must not have one that takes samples out.
        (weighted(a=1, masks={"optional": True}), "whole.weights.masks", "Put the screen around whole"),
        # Who has no vote cannot decide.
        ({"kind": "panel", "judges": ["a", "m"], "reduce": "majority"}, "whole.reduce", "m defines no correctness"),
        ({"kind": "cascade", "stages": ["m", "a"]}, "whole.stages[0].decides", "m defines no correctness"),
        ({**GATE, "then": "passed"}, "whole", "two components of it have the name 'passed'"),
        ({**TURNS, "discount": 0.5, "reduce": "min"}, "whole", "discount is for `mean` and `sum`"),
        ({**TURNS, "judge": "best"}, "whole.judge", "judge best compares siblings, whose turns do not match"),
    ],
)
def test_what_cannot_work_is_refused_with_its_place(whole, place, said):
    found = mistakes_of(opened, whole=whole, **OTHERS)
    assert any(place in path and said in told for path, told in found.items()), found


def test_a_time_limit_ends_a_part_that_has_parts():
    """A time limit of anyio is delivered in each step of the event loop, in which a sum waits for its parts to end."""
    whole = {"kind": "panel", "judges": ["a", "inner"], "quorum": 1, "within_s": 2}
    judge = opened(whole=whole, inner=weighted(b=0.5, c=0.5))
    verdict, _, at = asked(judge, a=0.5, b=(100.0, 1.0), c=(100.0, 1.0))
    assert (verdict.components["a"], at) == (0.5, 2.0)


IN_TURNS = Sample(
    [{"role": "user", "content": "?"}],
    "assistant: a\n\ntool: b\n\nassistant: c",
    turns=[
        {"role": "assistant", "content": "a", "end": 12},
        {"role": "tool", "content": "b", "end": 21},
        {"role": "assistant", "content": "c", "end": 35},
    ],
)


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
def test_each_turn_is_judged_on_what_was_said_before(keys, score, dense):
    says, seen = [Verdict(score, components={"x": 2 * score}) for score in (0.25, 0.75)], []
    verdict, _, _ = asked(opened(whole={**TURNS, **keys}), sample=IN_TURNS, seen=seen, a=says)
    assert [sample.response for sample in seen] == ["a", "c"]
    assert [[message["content"] for message in sample.messages] for sample in seen] == [["?"], ["?", "a", "b"]]
    assert seen[1].messages[2] == {"role": "tool", "content": "b"}
    assert verdict.score == pytest.approx(score)
    assert verdict.steps == ((12, 0.25), (35, 0.75))
    assert verdict.dense == tuple((end, pytest.approx(added)) for end, added in dense)
    assert verdict.components == {"turns": 2.0, "a": 0.5, "a/x": 1.0}


def test_without_a_score_of_each_turn_there_is_none():
    failed, _, _ = asked(opened(whole=TURNS), sample=IN_TURNS, a=[0.25, DOWN])
    assert (failed.label, failed.detail) == ("infra/deadline", "a, turn 2: no answer")


@each_of(
    ("whole", "b", "score", "dense"),
    [
        # What other judges add is at the end of the response.
        (weighted(t=0.5, b=2), 0.25, 0.75, ((3, 0.25),)),
        # An optional part that is missing: the others share its weight.
        (weighted(t=1, b={"weight": 3, "optional": True}), DOWN, 2.0, ((3, 2.0),)),
        ({"kind": "gate", "when": "b", "at_least": 0.2, "then": "t"}, 0.25, 0.5, ((3, 0.5),)),
        ({"kind": "panel", "judges": ["t", "b"]}, 0.25, 0.375, ()),
    ],
)
def test_judges_of_judges_pass_on_what_turns_add(whole, b, score, dense):
    verdict, _, _ = asked(opened(t={**TURNS, "correct_at": 0.5}, whole=whole), a=0.5, b=b)
    assert (verdict.score, verdict.dense) == (pytest.approx(score), dense)


PARTS = {
    "quality": {"kind": "llm", "sources": "m", "criteria": {"proof": "Is it proven?"}},
    "format": {"kind": "function", "components": ["tags"]},
}


def total(**keys):
    return opened(**PARTS, whole={**weighted(quality=1, format=1), **keys})


def test_a_sum_is_finite_in_float32():
    said, _, _ = asked(total(weights={"quality": 3e38, "format": 3e38}), quality=1.0, format=1.0)
    assert (said.label, "not finite in float32" in said.detail) == ("verdict/invalid", True)


def test_floors_count_and_the_sum_says_so():
    invalid = Verdict(0.5, basis="floor", failure=Failed(Cause.VERDICT, "invalid", "no score"))
    verdict, _, _ = asked(total(weights={"quality": 0.5, "format": 2.0}), quality=0.25, format=invalid)
    assert (verdict.score, verdict.basis, verdict.failure.detail) == (1.125, "floor", "format: no score")


def test_sums_of_sums_are_added_and_name_their_components_by_the_way_to_them():
    parts = {**PARTS, "format": {"kind": "function", "reward_range": [0, 1]}}
    top = opened(**parts, whole=weighted(inner=2, format=-1), inner=weighted(quality=0.5, format=0.5))
    assert top.component_names() == ("inner", "inner/quality", "inner/quality/proof", "inner/format", "format")
    assert top.calls == 3
    said, _, _ = asked(top, quality=Verdict(1.0, components={"proof": 0.5}, rationale="fair"), format=0.5)
    assert (said.score, said.rationale) == (pytest.approx(2 * 0.75 - 0.5), "inner: quality: fair")
    assert list(said.components.values()) == [0.75, 1.0, 0.5, 0.5, 0.5]
    assert tuple(said.components) == top.component_names()
    said, _, at = asked(top, quality=Unanswered("exhausted", "500"), format=(9.0, 0.5))
    assert (said.detail, at) == ("inner: quality: 500", 1.0)


# The judges together


def router(judges, routes=None):
    model = {"kind": "openai", "base_url": "http://a/v1", "model": "m"}
    sources = {"m": model, "f": {"kind": "function", "function": "rules:score"}}
    config = load_config({"sources": sources, "judges": judges, "routes": routes or {}})
    return JudgeRouter(config, key=b"a key that no policy can see")


def test_components_are_those_of_whoever_samples_go_to():
    judges = {"quality": {**PARTS["quality"], "correct_at": 0.5}, "format": {"kind": "function"}}
    judges["total"] = weighted(quality=1, format=1)
    alone, routed = router(judges), router(judges, {"code": "quality", "*": "total"})
    assert alone.component_names() == ("quality", "quality/proof", "format")
    assert routed.component_names() == ("proof", "quality", "quality/proof", "format")
    assert (alone.defines_correct, routed.defines_correct) == (False, True)
    assert alone.judge_of(Sample([], "x")) is alone.judges["total"]
    samples = [Sample([], "x", data_source=name) for name in ("code", "math", "math")]
    assert [routed.judge_of(each).name for each in samples] == ["quality", "total", "total"]
    assert (routed.calls_of(samples), routed.most_calls) == (5, 2)


def test_what_a_judge_of_turns_sees_goes_through_its_parts():
    turns = router({"a": {"kind": "function"}, "both": weighted(a=1.0), "whole": {"kind": "turns", "judge": "both"}})
    assert [sample.response for sample in turns.seen_by("a", IN_TURNS)] == ["a", "c"]
    assert turns.seen_by("whole", IN_TURNS) == [IN_TURNS]


def test_a_part_that_is_cancelled_by_something_else_is_a_bug_and_ends_the_others():
    said, _, at = asked(opened(whole=weighted(a=0.5, b=0.5)), a=asyncio.CancelledError(), b=(100.0, 1.0))
    assert ("judge a was cancelled" in str(said), at) == (True, 1.0)
