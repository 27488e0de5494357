"""slime's samples in the core's words."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import slime_adapter
from qreward_plugins.samples.check import Rejected, read_sample
from slime_adapter.samples import to_sample
from tests.kit import each_of

CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n1 + 2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
GLM = "[gMASK]<sop><|system|>\nBe brief.<|user|>\n1 + 2?<|assistant|>\n"


@each_of("prompt", [CHATML, LLAMA, GLM])
def test_a_templated_prompt_is_read_back_into_messages(make_group, prompt):
    messages = to_sample(make_group("42", prompt=prompt)[0]).messages
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}]


def test_the_step_is_the_rollout_that_slime_counts(make_group, monkeypatch):
    (sample,) = make_group("42")
    monkeypatch.delitem(sys.modules, "slime.rollout.sample_hooks", raising=False)
    assert to_sample(sample).step is None
    hooks = ModuleType("slime.rollout.sample_hooks")
    monkeypatch.setitem(sys.modules, "slime.rollout.sample_hooks", hooks)
    assert to_sample(sample).step is None, "another version of slime"
    for number in (None, 0, 7):
        hooks._current_rollout_id = number
        assert to_sample(sample).step == number


def test_every_field_finds_its_place(make_group):
    (sample,) = make_group("It is 42.", group=7)
    sample.metadata = {"source_name": "add", "difficulty": 3, "qreward": {"excluded": True}}
    told = to_sample(sample)
    assert (told.response, told.ground_truth, told.data_source) == ("It is 42.", "42", "add")
    assert (told.group_id, told.split, told.id) == ("7", "train", "0")
    assert told.extras == {"source_name": "add", "difficulty": 3}
    assert to_sample(make_group("42", group=None)[0]).split == "val"
    for metadata, source in (
        ({"data_source": "a", "source_name": "b"}, "a"),
        ({"rm_type": "math"}, "math"),
        (None, ""),
    ):
        assert to_sample(make_group("42", metadata=metadata)[0]).data_source == source
    bare = to_sample(object())
    assert (bare.response, bare.messages) == ("", [{"role": "user", "content": ""}])


def test_every_path_that_a_flag_may_name_is_there():
    assert all(callable(getattr(slime_adapter, name)) for name in slime_adapter.__all__)
    with pytest.raises(AttributeError, match="post_process"):
        _ = slime_adapter.postprocess


@each_of(
    ("attribute", "value", "field"),
    [
        ("response", None, "response"),
        ("prompt", None, "messages"),
        ("prompt", [{"role": "user", "content": {"text": "17 + 25?"}}], "messages"),
        ("metadata", ["add"], "extras"),
        ("metadata", {"data_source": ["add"]}, "data_source"),
        ("group_index", [1], "group_id"),
    ],
)
def test_a_broken_sample_is_its_own_failure_by_the_name_of_the_field(make_group, attribute, value, field):
    (sample,) = make_group("42")
    setattr(sample, attribute, value)
    read = read_sample(to_sample(sample))
    assert isinstance(read, Rejected)
    assert read.problem.startswith(field)
