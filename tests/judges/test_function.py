"""The judge over reward functions: numbers and mappings in, verdicts or `InvalidReply` out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from qreward_plugins.errors import ConfigurationError, InvalidReply
from qreward_plugins.samples import RawScore, Sample
from qreward_plugins.sources.base import Reply

from ..kit import each_of, later

torch = later("torch")


def read(judge, value):
    request = judge.request(Sample([], "4"), attempt=0)
    return judge.verdict(request, Reply(value=value, model="module:reward"))


def refused(judge, value, said):
    """What is not taken is never quoted."""
    with pytest.raises(InvalidReply, match=said) as caught:
        read(judge, value)
    assert "SECRET" not in str(caught.value)


@each_of(
    "value",
    lambda: [
        *(0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5, dtype=torch.bfloat16)),
        *(torch.tensor(0.5, requires_grad=True), 1, np.int64(-3), torch.tensor(2)),
    ],
)
def test_numbers_of_all_kinds_are_scores(function, value):
    plain = value.item() if hasattr(value, "item") else value
    for given_value in (value, {"score": value}):
        verdict = read(function(), given_value)
        assert type(verdict.score) is float
        assert (verdict.score, verdict.correct, dict(verdict.components)) == (plain, None, {})
        assert (verdict.judge, verdict.model) == ("rules", "module:reward")


class _Odd:
    def __repr__(self):
        raise ValueError("Exceeds the limit (4300 digits) for integer string conversion")


def _endless():
    found = ["SECRET"]
    found.append(found)
    return found


@each_of(
    ("returned", "kept"),
    lambda: [
        ("fine", "fine"),
        (math.nan, None),
        (np.array([1.5]), [1.5]),
        ({"deep": [math.nan, "the SECRET"], 3: b"x"}, {"deep": [None, "the ***"], "3": "b'x'"}),
        (2**70, str(2**70)),
        ("\ud800", "\ufffd"),
        ({1}, "{1}"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (_endless(), "['***', [...]]"),
        (10**5000, "a value of type int"),
        (_Odd(), "a value of type _Odd"),
        ({"pred": _Odd()}, {"pred": "a value of type _Odd"}),
    ],
)
def test_what_a_function_returned_beside_its_score_is_kept_as_json(function, returned, kept):
    """A function may parse a response into anything; the trainer and the reward server write it later."""
    judge = function()
    reply = Reply(value={"score": 1.0, "pred": returned}, clean=lambda text: text.replace("SECRET", "***"))
    verdict = judge.verdict(judge.request(Sample([], "4"), attempt=0), reply)
    assert verdict.returned == {"score": 1.0, "pred": kept}


@each_of(
    ("value", "said"),
    lambda: [
        *((value, "type bool") for value in (True, np.bool_(True), torch.tensor(True))),
        *((value, "not finite") for value in (math.nan, 1e39, torch.tensor(float("-inf")), 10**400)),
        (None, "NoneType"),
        ("SECRET", "type str"),
        (torch.tensor([0.5]), "Tensor"),
        (torch.tensor(0.5, device="meta"), "cannot be read"),
        ({"SECRET": 1}, "without the key `score`"),
    ],
)
def test_what_is_no_finite_number_is_invalid(function, value, said):
    refused(function(), value, said)
    if not isinstance(value, dict):
        refused(function(), {"score": value, "acc": True}, said)


def test_every_number_becomes_a_component_unless_they_are_named(function):
    value = {"score": 0.5, "acc": True, "format": np.float32(0.25), "steps": 3, "passed": np.bool_(False)}
    value |= {"tensor": torch.tensor(2.0), "pred": "4", "nan": math.nan, "none": None, "list": [1.0], 7: 1.0}
    components = {"acc": 1.0, "format": 0.25, "steps": 3.0, "passed": 0.0, "tensor": 2.0}
    assert read(function(), value).components == components
    assert read(function(components=("steps", "acc")), value).components == {"steps": 3.0, "acc": 1.0}
    said = {"pred": "holds no finite number", "nan": "holds no finite number", "missing": "is missing"}
    for name, words in said.items():
        refused(function(components=(name,)), value, words)


def test_there_is_an_end_to_components_that_nobody_named(function):
    value = {"score": 0.5, **{f"c{number}": 1.0 for number in range(101)}}
    refused(function(), value, r"101 numbers beside its score; list the ones .* judges\.rules\.components")
    assert read(function(components=("c7",)), value).components == {"c7": 1.0}


def test_acc_defines_correctness_and_a_range_is_kept(function):
    cases = (True, True), (False, False), (1, True), (0.0, False), (torch.tensor(True), True), (0.5, None), (None, None)
    for acc, correct in cases:
        assert read(function(), {"score": 0.0, "acc": acc}).correct is correct
    judge = function(reward_range=(-1, 1))
    assert [read(judge, value).score for value in (-1, 0, 1)] == [-1.0, 0.0, 1.0]
    for value in (-1.001, 1.001, {"score": 2, "acc": True}):
        refused(judge, value, "outside the reward range -1 to 1")


def test_numbers_that_contradict_each_other_are_mistakes(function):
    with pytest.raises(ConfigurationError, match=r"judges\.rules\.on_invalid: there is no floor"):
        function(on_invalid="floor")


def test_numbers_on_record_are_mapped_as_those_of_a_reply(function):
    value = {"score": 2, "acc": True, "tags": 0.5, "said": "text"}
    raw = read(function(components=("tags",)), value).raw
    assert raw == RawScore(2.0, {"acc": 1.0, "tags": 0.5})
    for keys in ({}, {"components": ("tags",)}, {"correct_at": 3}, {"reward_range": (0, 2)}):
        judge = function(**keys)
        assert replace(judge.mapped(raw), model="module:reward") == read(judge, value)
    for keys in ({"components": ("form",)}, {"reward_range": (0, 1)}):
        with pytest.raises(InvalidReply):
            function(**keys).mapped(raw)
    assert len({function().fingerprint, function(reward_range=(0, 1), floor=0).fingerprint}) == 1
