"""An env manager of ROLL's agentic pipelines that plays one trajectory at a time, without gem, threads and queues.

It behaves as ROLL's `TrajEnvManager` does to a mixin: the history grows in the same way and ends with a turn without a
response, and the same parts of it are in the rollout and trained (env_manager/traj_env_manager.py).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias

import numpy as np
from omegaconf import OmegaConf

from ..generation import WordTokenizer
from ..tensors import objects
from .protocol import RollDataProto, torch

Reply: TypeAlias = Callable[[Sequence[Mapping[str, str]], random.Random], "str | None"]

_AGGREGATED: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "min": min,
    "max": max,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}


class Environment(Protocol):
    """The part of gem's environment interface that ROLL uses."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """The first observation, and further entries for the history."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The next observation, the reward, whether it terminated, whether it was truncated, and `metrics` and such."""


@dataclass
class RolloutCache:
    """A trajectory in progress. `history` has a dict for every turn, also for the last one without a response."""

    env_id: int
    group_id: int
    tag: str
    history: list[dict[str, Any]] = field(default_factory=list)
    frames: list[Any] = field(default_factory=list)
    truncated: bool = False
    terminated: bool = False
    step: int = 0


class FakeTrajEnvManager:
    """ROLL's `TrajEnvManager` for unit tests of what overrides `formulate_rollouts` and its other methods.

    `respond(messages, rng)` returns a turn of the policy, or None if the context is too long, which ends the
    trajectory. `env_config` is the environment's configuration: `tag`, `group_id`, `env_id`, `max_steps`, `group_seed`,
    and all of `custom_envs.<tag>`. `group_size` is that of ROLL's `train_env_manager`.

    Raises `TypeError` for an unknown argument, as Python does.
    """

    def __init__(
        self,
        *,
        env: Environment,
        respond: Reply,
        env_config: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        sequence_length: int = 512,
        agent_system_template: str = "You are an agent.",
        agent_template: str = "{observation}",
        seed: int = 0,
        mode: str = "train",
        group_size: int = 1,
    ) -> None:
        defaults = {"tag": "env", "group_id": 0, "env_id": 0, "group_seed": 0, "max_steps": 10}
        self.env_config: Any = OmegaConf.create({**defaults, **(env_config or {})})
        self.env = env
        self.tokenizer = tokenizer if tokenizer is not None else WordTokenizer()
        self.mode = mode
        self.worker_config = SimpleNamespace(group_size=group_size)
        self.running = True
        self.sequence_length = sequence_length
        self.agent_system_template = agent_system_template
        self.agent_template = agent_template
        self.rollout_cache: Any = None
        self.episode_id: int | None = None
        self.group_seed = seed + int(self.env_config["group_seed"])
        self._respond = respond
        self._seed = seed

    def play(self, episode_id: int = 0) -> RollDataProto:
        """Play one trajectory and return its rollout, a batch of one: `input_ids`, `attention_mask`, `position_ids`,
        `prompt_mask`, `response_mask` and `scores` (1, `sequence_length`), and `episode_scores` and `step_scores`.

        Raises the errors of the environment and of `respond`, and `IndexError`, as ROLL does, if there was no turn.
        """
        self.episode_id = episode_id
        cache = self.reset()
        while not cache.terminated:
            answer = self.make_decision(cache)
            if answer is None:
                break
            cache = self.step(answer)
        rollout: RollDataProto = self.formulate_rollouts(cache)
        group = f"{cache.tag}_{cache.group_id}_{episode_id}_{self.group_seed}"
        rollout.non_tensor_batch["traj_group_id"] = objects([group] * len(rollout))
        rollout.non_tensor_batch["traj_id"] = objects([f"{group}_{cache.env_id}"] * len(rollout))
        return rollout

    def stop(self) -> None:
        """ROLL's call before it shuts down."""
        self.running = False

    def reset(self) -> RolloutCache:
        """Start a trajectory."""
        config = self.env_config
        self.rollout_cache = RolloutCache(env_id=config["env_id"], group_id=config["group_id"], tag=config["tag"])
        observation, info = self.env.reset(seed=self.group_seed + (self.episode_id or 0))
        self._open_turn(observation, **info)
        cache: RolloutCache = self.rollout_cache
        return cache

    def _open_turn(self, observation: str, **more: Any) -> None:
        left = self.env_config["max_steps"] - self.rollout_cache.step
        self.rollout_cache.history.append({"observation": observation, "actions_left": left, "messages": None, **more})

    def make_decision(self, rollout_cache: RolloutCache) -> list[int] | None:
        """The tokens of the policy's turn; None if there is no room for one."""
        turn = self.format_messages(rollout_cache)
        earlier = [token for done in rollout_cache.history[:-1] for token in done["prompt_ids"] + done["response_ids"]]
        messages = [message for opened in rollout_cache.history for message in opened["messages"]]
        rng = random.Random(f"{self._seed}/{rollout_cache.env_id}/{self.episode_id}/{rollout_cache.step}")
        room = self.sequence_length - len(earlier) - len(turn["prompt_ids"])
        text = self._respond(messages, rng) if room > 0 else None
        if text is None:
            return None
        tokens: list[int] = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id][:room]
        turn["response_ids"] = tokens
        turn["infer_logprobs"] = [0.0] * len(tokens)
        answer = self.tokenizer.decode(tokens, skip_special_tokens=True)
        turn["messages"].append({"role": "assistant", "content": answer})
        return tokens

    def format_messages(self, rollout_cache: RolloutCache) -> dict[str, Any]:
        """Add its messages and their tokens to the last turn."""
        turn = rollout_cache.history[-1]
        messages = []
        asked = self.agent_template.format(
            observation=turn["observation"], turn_idx=rollout_cache.step + 1, suffix=turn.get("suffix", "")
        )
        if turn["actions_left"] == self.env_config["max_steps"]:
            messages.append({"role": "system", "content": self.agent_system_template})
            if "env_instruction" in turn:
                asked = f"{turn['env_instruction']}\n{asked}"
        messages.append({"role": "user", "content": asked})
        turn["messages"] = messages
        turn["prompt_ids"] = list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        return turn

    def step(self, llm_output: Sequence[int]) -> RolloutCache:
        """Pass the policy's turn to the environment, and open the next one."""
        cache: RolloutCache = self.rollout_cache
        action = self.tokenizer.decode(llm_output, skip_special_tokens=False)
        observation, reward, cache.terminated, cache.truncated, info = self.env.step(action=action)
        suffix = {"suffix": info.pop("suffix")} if "suffix" in info else {}
        cache.step += 1
        if cache.step >= self.env_config["max_steps"]:
            cache.truncated = cache.truncated or not cache.terminated
            cache.terminated = True
        cache.history[-1].update(reward=reward, llm_response=action, **info)
        self._open_turn(observation, **suffix)
        return cache

    def formulate_rollouts(self, rollout_cache: RolloutCache) -> RollDataProto:
        """The rollout of a trajectory. The last token of `scores` has the sum of the turns' rewards."""
        history = rollout_cache.history
        if "observation" in history[-1]:
            history.pop()
        history[-1]  # ROLL reads the last turn: an IndexError if there was none
        step_scores = [turn["reward"] for turn in history]
        tokens: list[int] = []
        is_response: list[bool] = []
        for turn in history:
            tokens += [*turn["prompt_ids"], *turn["response_ids"]]
            is_response += [False] * len(turn["prompt_ids"]) + [True] * len(turn["response_ids"])
        count, first = len(tokens), is_response.index(True)
        scores = [0.0] * (count - 1) + [sum(step_scores)]
        batch = {
            "input_ids": self._padded(tokens, self.tokenizer.pad_token_id),
            "attention_mask": self._padded([1] * count),
            "position_ids": self._padded(list(range(count))),
            "response_mask": self._padded(is_response),
            "prompt_mask": self._padded([True] * first + [False] * (count - first)),
            "scores": self._padded(scores),
        }
        columns = {
            "env_ids": [rollout_cache.env_id],
            "group_ids": [rollout_cache.group_id],
            "tags": [rollout_cache.tag],
            "step_scores": [step_scores],
            "episode_scores": [sum(step_scores)],
        }
        metrics = {f"env/{rollout_cache.tag}/{name}": value for name, value in _metrics(history).items()}
        metrics[f"env/{rollout_cache.tag}/num_actions"] = rollout_cache.step
        return RollDataProto.from_dict(batch, columns, {"metrics": metrics})

    def _padded(self, values: Sequence[Any], padding: Any = 0) -> Any:
        cut = np.array(values[: self.sequence_length])
        kind = np.float32 if cut.dtype == np.float64 else cut.dtype
        whole = np.full((1, self.sequence_length), padding, dtype=kind)
        whole[0, : len(cut)] = cut
        return torch.tensor(whole)


def _metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    modes = history[-1].get("metrics_agg_mode", {})
    values: dict[str, list[float]] = {}
    for turn in history:
        for name, value in turn.get("metrics", {}).items():
            values.setdefault(name, []).append(float(value))
    return {name: _AGGREGATED.get(modes.get(name), statistics.fmean)(several) for name, several in values.items()}
