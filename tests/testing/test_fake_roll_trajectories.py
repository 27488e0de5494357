"""The fake env manager: how a trajectory grows, and what of it becomes a rollout."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from qreward_plugins.testing import FakeTrajEnvManager


class Countdown:
    """Over after so many turns; each gives 0.5."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.actions: list[str] = []
        self.seed: int | None = None

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        self.actions = []
        return f"{self.turns} left", {"env_instruction": "Count down."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        left = self.turns - len(self.actions)
        info = {"metrics": {"left": left, "last": left}, "metrics_agg_mode": {"last": "last"}, "suffix": "!"}
        return f"{left} left", 0.5, left <= 0, False, info


def say(messages: Sequence[Mapping[str, str]], rng: random.Random) -> str | None:
    return f"turn {sum(message['role'] == 'assistant' for message in messages)}"


class Watched(FakeTrajEnvManager):
    """Adds a reward to the last turn, as a judge would."""

    def formulate_rollouts(self, rollout_cache: Any) -> Any:
        self.histories = [dict(turn) for turn in rollout_cache.history]
        acted = [turn for turn in rollout_cache.history if "llm_response" in turn]
        acted[-1]["reward"] += 2.0
        return super().formulate_rollouts(rollout_cache)


def test_a_trajectory_ends_with_a_turn_that_was_only_opened() -> None:
    env = Countdown(2)
    manager = Watched(env=env, respond=say, env_config={"tag": "count", "group_id": 3, "env_id": 7}, seed=5)
    rollout = manager.play(episode_id=4)
    assert env.seed == 9
    assert env.actions == ["turn 0<|im_end|>", "turn 1<|im_end|>"]
    first, second, opened = manager.histories
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant"]
    assert first["messages"][1]["content"] == "Count down.\n2 left"
    assert second["messages"][-1] == {"role": "assistant", "content": "turn 1"}
    assert (second["reward"], second["llm_response"]) == (0.5, "turn 1<|im_end|>")
    assert (opened["observation"], opened["messages"], opened.get("reward")) == ("0 left", None, None)
    assert opened["suffix"] == "!"
    assert rollout.non_tensor_batch["episode_scores"].tolist() == [3.0]
    assert rollout.non_tensor_batch["step_scores"].tolist() == [[0.5, 2.5]]
    assert rollout.non_tensor_batch["tags"].tolist() == ["count"]
    assert rollout.non_tensor_batch["traj_group_id"].tolist() == ["count_3_4_5"]
    assert rollout.non_tensor_batch["traj_id"].tolist() == ["count_3_4_5_7"]


def test_a_rollout_trains_what_the_policy_said() -> None:
    manager = FakeTrajEnvManager(env=Countdown(2), respond=say, sequence_length=64)
    rollout = manager.play()
    count = int(rollout.batch["attention_mask"].sum())
    assert rollout.batch["scores"].shape == (1, 64)
    assert rollout.batch["scores"][0, count - 1] == 1.0
    assert rollout.batch["scores"].sum() == 1.0
    trained = rollout.batch["input_ids"][0][rollout.batch["response_mask"][0]]
    assert manager.tokenizer.decode(trained) == "turn 0<|im_end|>turn 1<|im_end|>"
    assert rollout.batch["response_mask"].numpy().dtype == bool
    assert int(rollout.batch["prompt_mask"].sum()) == int(rollout.batch["response_mask"][0].int().argmax())
    metrics = rollout.meta_info["metrics"]
    assert (metrics["env/env/left"], metrics["env/env/last"]) == (0.5, 0.0)
    assert metrics["env/env/num_actions"] == 2


def test_the_last_step_allowed_cuts_a_trajectory_short() -> None:
    manager = Watched(env=Countdown(5), respond=say, env_config={"max_steps": 3})
    rollout = manager.play()
    assert (manager.rollout_cache.terminated, manager.rollout_cache.truncated) == (True, True)
    assert rollout.non_tensor_batch["step_scores"].tolist() == [[0.5, 0.5, 2.5]]


def test_a_context_that_is_full_ends_a_trajectory_where_it_is() -> None:
    def short(messages: Sequence[Mapping[str, str]], rng: random.Random) -> str | None:
        return say(messages, rng) if len(messages) < 4 else None

    manager = Watched(env=Countdown(5), respond=short)
    rollout = manager.play()
    assert len(manager.histories) == 2
    assert rollout.non_tensor_batch["step_scores"].tolist() == [[2.5]]
    with pytest.raises(IndexError):
        FakeTrajEnvManager(env=Countdown(5), respond=lambda messages, rng: None).play()
    with pytest.raises(IndexError):
        FakeTrajEnvManager(env=Countdown(5), respond=say, sequence_length=4).play()


def test_the_same_seed_plays_the_same_trajectory() -> None:
    def said(seed: int) -> list[str]:
        env = Countdown(2)
        FakeTrajEnvManager(env=env, respond=lambda messages, rng: str(rng.random()), seed=seed).play()
        return env.actions

    assert said(1) == said(1)
    assert said(1) != said(2)
