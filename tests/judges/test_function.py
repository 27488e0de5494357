"""The judge over reward functions: numbers and mappings in, verdicts or `InvalidReply` out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.errors import ConfigurationError, InvalidReply
from qreward_plugins.judges import FunctionJudge
from qreward_plugins.samples import RawScore, Sample, Verdict
from qreward_plugins.sources.base import Reply

from ..kit import each_of

torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'qreward-plugins[demo]')")

Build = Callable[..., FunctionJudge]


def read(judge: FunctionJudge, value: Any) -> Verdict:
    request = judge.request(Sample([], "4"), attempt=0)
    return judge.verdict(request, Reply(value=value, model="module:reward"))


@each_of(
    "value",
    [
        0.5,
        np.float32(0.5),
        np.array(0.5),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.tensor(0.5, requires_grad=True),
    ],
)
def test_numbers_of_all_kinds_are_scores(function: Build, value: Any) -> None:
    for given_value in (value, {"score": value}):
        verdict = read(function(), given_value)
        assert type(verdict.score) is float
        assert (verdict.score, verdict.correct, dict(verdict.components)) == (0.5, None, {})
        assert (verdict.judge, verdict.model) == ("rules", "module:reward")
    assert read(function(), 1).score == 1.0
    assert read(function(), np.int64(-3)).score == -3.0
    assert read(function(), torch.tensor(2)).score == 2.0


@each_of(
    ("value", "said"),
    [
        (True, "return 1.0 or 0.0"),
        (np.bool_(True), "return 1.0 or 0.0"),
        (torch.tensor(True), "return 1.0 or 0.0"),
        (None, "NoneType"),
        ("0.5", "type str"),
        (Decimal("0.5"), "Decimal"),
        ([0.5], "type list"),
        (np.array([0.5]), "ndarray"),
        (torch.tensor([0.5]), "Tensor"),
        (torch.tensor(0.5, device="meta"), "cannot be read"),
        (math.nan, "not finite"),
        (torch.tensor(float("-inf")), "not finite"),
        (10**400, "not finite"),
    ],
)
def test_what_is_no_finite_number_is_invalid(function: Build, value: Any, said: str) -> None:
    for given_value in (value, {"score": value, "acc": True}):
        with pytest.raises(InvalidReply, match=said):
            read(function(), given_value)


def test_messages_never_quote_the_value(function: Build) -> None:
    for value in ("SECRET", ["SECRET"], {"score": "SECRET"}, {"SECRET": 1}):
        with pytest.raises(InvalidReply) as caught:
            read(function(), value)
        assert "SECRET" not in str(caught.value)


def test_every_number_becomes_a_component_unless_they_are_named(function: Build) -> None:
    value = {
        "score": 0.5,
        "acc": True,
        "format": np.float32(0.25),
        "steps": 3,
        "passed": np.bool_(False),
        "tensor": torch.tensor(2.0),
        "pred": "4",
        "nan": math.nan,
        "none": None,
        "list": [1.0],
        7: 1.0,
    }
    components = {"acc": 1.0, "format": 0.25, "steps": 3.0, "passed": 0.0, "tensor": 2.0}
    assert read(function(), value).components == components
    assert read(function(components=("steps", "acc")), value).components == {"steps": 3.0, "acc": 1.0}
    for name, said in (
        ("pred", "holds no finite number"),
        ("nan", "holds no finite number"),
        ("missing", "is missing"),
    ):
        with pytest.raises(InvalidReply, match=said):
            read(function(components=(name,)), value)


def test_there_is_an_end_to_components_that_nobody_named(function: Build) -> None:
    value = {"score": 0.5, "x" * 200: 1.0, **{f"c{number}": 1.0 for number in range(100)}}
    assert len(read(function(), value).components) == 100
    with pytest.raises(InvalidReply, match=r"101 numbers beside its score; list the ones .* judges\.rules\.components"):
        read(function(), {**value, "more": 1})
    assert read(function(components=("c7",)), {**value, "more": 1}).components == {"c7": 1.0}


@each_of(
    ("acc", "correct"),
    [
        (True, True),
        (False, False),
        (1, True),
        (0.0, False),
        (torch.tensor(True), True),
        (0.5, None),
        (None, None),
    ],
)
def test_acc_defines_correctness(function: Build, acc: Any, correct: bool | None) -> None:
    assert read(function(), {"score": 0.0, "acc": acc}).correct is correct


def test_scores_outside_the_reward_range_are_invalid(function: Build) -> None:
    judge = function(reward_range=(-1, 1))
    assert [read(judge, value).score for value in (-1, 0, 1)] == [-1.0, 0.0, 1.0]
    for value in (-1.001, 1.001, {"score": 2, "acc": True}):
        with pytest.raises(InvalidReply, match="outside the reward range -1 to 1"):
            read(judge, value)


def test_numbers_that_contradict_each_other_are_mistakes(function: Build) -> None:
    with pytest.raises(ConfigurationError, match=r"judges\.rules\.on_invalid: there is no floor"):
        function(on_invalid="floor")
    with pytest.raises(ConfigurationError) as caught:
        function(reward_range=(0, 1), floor=-1, correct_at=2)
    assert [mistake.path for mistake in caught.value.mistakes] == ["judges.rules.floor", "judges.rules.correct_at"]


def test_numbers_on_record_are_mapped_as_those_of_a_reply(function: Build) -> None:
    value = {"score": 2, "acc": True, "tags": 0.5, "said": "text"}
    raw = read(function(components=("tags",)), value).raw
    assert raw == RawScore(2.0, {"acc": 1.0, "tags": 0.5})
    for keys in ({}, {"components": ("tags",)}, {"correct_at": 3}, {"reward_range": (0, 2)}):
        judge = function(**keys)
        assert replace(judge.mapped(raw), model="module:reward") == read(judge, value)
    for keys in ({"components": ("form",)}, {"reward_range": (0, 1)}):
        with pytest.raises(InvalidReply):
            function(**keys).mapped(raw)
    many = {"score": 1, **{f"{n}": n for n in range(101)}}
    assert read(function(components=("7",)), many).raw is None
    assert len({function().fingerprint, function(reward_range=(0, 1), floor=0).fingerprint}) == 1


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.complex_numbers()
    | st.floats(width=32).map(np.float32)
    | st.floats().map(torch.tensor)
    | st.booleans().map(np.bool_),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["score", "acc", "a", "b"]) | st.integers(), inner, max_size=4)
    ),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(value=VALUES, ranged=st.booleans(), components=st.sampled_from([(), ("a",)]))
def test_any_value_is_a_verdict_or_invalid(
    function: Build, value: Any, ranged: bool, components: tuple[str, ...]
) -> None:
    judge = function(reward_range=(0, 1) if ranged else None, components=components)
    try:
        verdict = read(judge, value)
    except InvalidReply:
        return
    assert math.isfinite(verdict.score)
    assert not ranged or 0 <= verdict.score <= 1
    assert not components or set(verdict.components) == {"a"}
