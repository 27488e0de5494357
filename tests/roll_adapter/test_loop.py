"""The rollout loop with workers of others, whose NaN it takes for what it is, and in validation."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qreward_plugins.testing import RollDataProto
from qreward_plugins.testing.roll.generation import torch
from qreward_plugins.testing.roll.workers import Worker


class Spoilt(Worker):
    """Rewards by the place in the group; what is no number stays none."""

    rewards = (0.0, math.nan, 1.0, 0.5)
    scores = rewards

    def initialize(self, pipeline_config: Any) -> None:
        super().initialize(pipeline_config)
        self.tokenizer = pipeline_config.actor_train.model_args.qreward_tokenizer

    async def compute_rewards(self, data: Any) -> Any:
        places = [int(text) for text in self.tokenizer.batch_decode(data.batch["responses"], skip_special_tokens=True)]
        tensors = {
            "token_level_rewards": torch.zeros(len(data), data.batch["responses"].shape[-1]),
            "response_level_rewards": torch.tensor([self.rewards[place] for place in places]),
            "scores": torch.tensor([self.scores[place] for place in places]),
        }
        return RollDataProto.from_dict(tensors, meta_info={"metrics": {}})


def number(draft: Any, rng: Any) -> str:
    return str(draft.number)


MODES = [pytest.param({"is_num_return_sequences_expand": True}, id="single"), pytest.param({}, id="group")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("rewards", "scores", "expected", "masked"),
    [
        ((0.0, math.nan, 1.0, 0.5), (0.0, math.nan, 1.0, 0.5), [0.0, 0.5, 1.0, 0.5], [1]),
        ((0.0, math.inf, 1.0, 0.5), (0.0, 1.0, math.nan, 0.5), [0.0, 0.25, 0.25, 0.5], [1, 2]),
    ],
)
def test_what_is_no_number_of_another_worker_is_masked_and_poisons_nothing(
    train, mode, rewards, scores, expected, masked
) -> None:
    worker = type("Worker", (Spoilt,), {"rewards": rewards, "scores": scores})
    step = train(number, reward={"worker_cls": worker}, **mode).step()
    assert not step.poisoned
    assert step.raw_rewards == pytest.approx(expected * 2)
    assert step.scores == pytest.approx(expected * 2)
    assert step.trained_tokens == [0 if place in masked else 2 for place in range(4)] * 2
    assert not [name for name in step.metrics if "qreward" in name], "these rewards are not ours"


def test_rolls_own_filter_sees_the_neutral_rewards(train) -> None:
    flat = {"type": "std_filter", "filter_args": {"std_threshold": 0.0}}
    calls = 0

    class Once(Spoilt):
        async def compute_rewards(self, data: Any) -> Any:
            nonlocal calls
            calls += 1
            self.rewards = self.scores = (0.0, math.nan, 1.0, 0.5) if calls > 2 else (0.5, math.nan, 0.5, 0.5)
            return await super().compute_rewards(data)

    step = train(number, reward={"worker_cls": Once, "query_filter_config": flat}).step()
    assert len(step.dropped) == 2
    assert step.raw_rewards == pytest.approx([0.0, 0.5, 1.0, 0.5] * 2)
