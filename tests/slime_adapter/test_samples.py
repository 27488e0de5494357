"""slime's samples in the core's words."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from qreward_plugins.samples.check import Rejected, read_sample
from qreward_plugins.samples.images import Image
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
    assert to_sample(sample).step is None
    monkeypatch.setitem(sys.modules, "slime.rollout.sample_hooks", SimpleNamespace(_current_rollout_id=7))
    assert to_sample(sample).step == 7


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


def test_images_take_their_places_in_the_prompt_and_the_rest_is_of_the_response(make_group):
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    images = [pillow.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    prompt = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n"
    told = to_sample(make_group("it is", prompt=prompt, multimodal_inputs={"images": images})[0])
    assert [part["type"] for part in told.messages[0]["content"]] == ["image", "text"]
    assert told.response_images == [Image.of(images[1])]
