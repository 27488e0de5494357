"""Images in verl's rollouts: in the messages, in a column of their own, and of an agent loop."""

from __future__ import annotations

import base64
import io

import pytest

from qreward_plugins.samples.check import Rejected, read_sample
from qreward_plugins.samples.images import Image
from qreward_plugins.testing import FakeVerlTrainer, JudgeServer
from verl_adapter.rollouts import to_sample

from ..kit import each_of
from .conftest import said

Pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

RED, BLUE = (Pillow.new("RGB", (8, 6), colour) for colour in ("red", "blue"))


def sample_of(make_data, **columns):
    item = make_data(["It is red."], columns={name: [value] for name, value in columns.items()})[0]
    return to_sample(item, said("It is red."))


def part(image, **more):
    return {"type": "image", "image": image, **more}


def test_an_agent_loop_can_pass_images_of_the_response(make_data):
    sample = sample_of(make_data, tool_extra_fields={"qreward_images": [BLUE], "turns": 3})
    assert sample.response_images == [Image.of(BLUE)]
    assert sample.extras["turns"] == 3
    assert "qreward_images" not in sample.extras


@each_of("images", [3, ["http://h/a.png"], [None]])
def test_odd_images_fail_their_sample(make_data, images):
    sample = sample_of(make_data, tool_extra_fields={"qreward_images": images})
    assert isinstance(read_sample(sample), Rejected)


@each_of("use_v1", [True, False])
def test_a_judge_sees_the_images_of_a_training(use_v1):
    content = [part(RED), {"type": "text", "text": "What is it?"}, part(BLUE)]
    seen = []

    def score(call):
        seen.append(call.messages[-1]["content"])
        return 5.0

    with JudgeServer(score) as server:
        overrides = [
            "+reward_manager=qreward",
            f"trainer.use_v1={use_v1}",
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=1",
            "actor_rollout_ref.rollout.n=2",
            f"+qreward.sources.j={{kind: openai, base_url: '{server.base_url}', model: judge, vision: true}}",
            "+qreward.judges.j.kind=llm",
        ]
        with FakeVerlTrainer(overrides, rows=[{"prompt": [{"role": "user", "content": content}]}]) as fake:
            step = fake.step()
    assert step.scores == [0.5, 0.5]
    for parts in seen:
        assert "[image 1 of the prompt]\nWhat is it?\n[image 2 of the prompt]" in parts[0]["text"]
        urls = [each["image_url"]["url"] for each in parts if each["type"] == "image_url"]
        shown = [Pillow.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
        assert [found.convert("RGB").getpixel((0, 0)) for found in shown] == [(255, 0, 0), (0, 0, 255)]
