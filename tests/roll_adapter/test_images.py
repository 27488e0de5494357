"""Images in a training with ROLL: in a pipeline for vision models, and in agentic trajectories."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qreward_plugins.samples.images import Image
from qreward_plugins.testing import JudgeServer
from roll_adapter.trajectories import QRewardTrajectoryMixin

Pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def test_a_judge_sees_the_images_of_a_training(train: Any, words: Any) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    rows = [
        {"messages": [{"role": "user", "content": content}], "images": [Pillow.new("RGB", (8, 6), colour)]}
        for colour in ("red", "blue", "green")
    ]
    rows.append({"messages": [{"role": "user", "content": "2 + 2?"}], "images": []})
    seen: list[Any] = []

    def score(call: Any) -> float:
        seen.append(call.messages[-1]["content"])
        return 5.0

    with JudgeServer(score) as server:
        source = {"kind": "openai", "base_url": server.base_url, "model": "judge", "vision": True}
        tree = {"sources": {"judge": source}, "judges": {"quality": {"kind": "llm"}}}
        trainer = train(words("it is"), reward={"reward_manager_config": [tree]}, rows=rows)
        steps = [trainer.step(), trainer.step()]
    assert [step.raw_rewards for step in steps] == [[0.5] * 8] * 2
    urls = [
        part["image_url"]["url"]
        for content in seen
        for part in content
        if isinstance(part, dict) and "image_url" in part
    ]
    shown = [Pillow.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).getpixel((0, 0)) for url in urls]
    assert len(set(shown)) == 3
    assert len(shown) == 12
    assert sum(isinstance(content, str) for content in seen) == 4


class Manager(QRewardTrajectoryMixin):
    pass


def test_what_later_turns_showed_is_of_the_response() -> None:
    red, blue = (np.full((6, 8, 3), colour, dtype=np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))
    prompt = [
        {"role": "system", "content": "play"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "go"}]},
    ]
    history = [
        {"observation": {"prompt": prompt, "image": [red]}, "llm_response": "left", "messages": None},
        {"observation": blue, "llm_response": "right", "messages": None},
        {"observation": "over"},
    ]
    cache = SimpleNamespace(tag="maze", group_id=1, env_id=2, history=history)
    sample = Manager().trajectory_sample(cache)
    assert [message["role"] for message in sample.messages] == ["system", "user"]
    assert Image.of(sample.messages[1]["content"][0]) == Image.of(Pillow.fromarray(red))
    assert sample.response == "assistant: left\n\nuser: [image]\n\nassistant: right"
    assert sample.response_images == [Image.of(Pillow.fromarray(blue))]
