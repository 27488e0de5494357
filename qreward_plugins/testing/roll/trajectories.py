"""An env manager of ROLL's agentic pipelines that plays one trajectory at a time, without gem, threads and queues.

It behaves as ROLL's `TrajEnvManager` does to a mixin: the history grows in the same way and ends with a turn without a
response, and the same parts of it are in the rollout and trained (env_manager/traj_env_manager.py).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from omegaconf import OmegaConf

from ..generation import WordTokenizer
from .protocol import RollDataProto, torch

Reply: TypeAlias = Callable[[Sequence[Mapping[str, str]], random.Random], "str | None"]


@dataclass
class RolloutCache:
    """A trajectory in progress. `history` has a dict for every turn, also for the last one without a response."""

    env_id: int
    group_id: int
    tag: str
    history: list[dict[str, Any]] = field(default_factory=list)
    truncated: bool = False
    terminated: bool = False
    step: int = 0


class FakeTrajEnvManager:
    """ROLL's `TrajEnvManager` for unit tests of what overrides `formulate_rollouts` and its other methods.

    `env` has gem's `reset(seed) -> (observation, info)` and `step(action) -> (observation, reward, terminated,
    truncated, info)`. `respond(messages, rng)` is the policy's turn; None ends the trajectory where it is, as a full
    context does. `env_config` has ROLL's keys (`tag`, `group_id`, `env_id`, `group_seed`, `max_steps`) and your own; it
    is an OmegaConf node, as in ROLL. `group_size` and `mode` are those of ROLL's `train_env_manager`.

    Raises `TypeError` for an unknown argument, as Python does.
    """

    def __init__(
        self,
        *,
        env: Any,
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
        """Play one trajectory and return its rollout, a batch of one: `input_ids`, `attention_mask`, `response_mask`
        and `scores` (1, `sequence_length`), and `tags`, `episode_scores` and `step_scores`.

        Raises the errors of the environment and of `respond`, and `IndexError`, as ROLL does, if there was no turn.
        """
        self.episode_id = episode_id
        cache = self.reset()
        while not cache.terminated:
            answer = self.make_decision(cache)
            if answer is None:
                break
            cache = self.step(answer)
        return self.formulate_rollouts(cache)

    def stop(self) -> None:
        """ROLL's call before it shuts down."""
        self.running = False

    def reset(self) -> RolloutCache:
        """Start a trajectory."""
        config = self.env_config
        self.rollout_cache = RolloutCache(env_id=config["env_id"], group_id=config["group_id"], tag=config["tag"])
        observation, info = self.env.reset(seed=self.group_seed + (self.episode_id or 0))
        self.rollout_cache.history.append({"observation": observation, "messages": None, **info})
        cache: RolloutCache = self.rollout_cache
        return cache

    def make_decision(self, rollout_cache: RolloutCache) -> list[int] | None:
        """The tokens of the policy's turn, which is added to the history; None if there is no room for one."""
        *earlier, turn = rollout_cache.history
        asked = self.agent_template.format(observation=turn["observation"], turn_idx=rollout_cache.step + 1)
        opening = [] if earlier else [{"role": "system", "content": self.agent_system_template}]
        turn["messages"] = [*opening, {"role": "user", "content": asked}]
        turn["prompt_ids"] = list(self.tokenizer.apply_chat_template(turn["messages"], add_generation_prompt=True))
        taken = sum(len(done["prompt_ids"]) + len(done["response_ids"]) for done in earlier) + len(turn["prompt_ids"])
        messages = [message for opened in rollout_cache.history for message in opened["messages"]]
        rng = random.Random(f"{self._seed}/{rollout_cache.env_id}/{self.episode_id}/{rollout_cache.step}")
        room = self.sequence_length - taken
        text = self._respond(messages, rng) if room > 0 else None
        if text is None:
            return None
        tokens: list[int] = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id][:room]
        turn["response_ids"] = tokens
        answer = self.tokenizer.decode(tokens, skip_special_tokens=True)
        turn["messages"].append({"role": "assistant", "content": answer})
        return tokens

    def step(self, llm_output: Sequence[int]) -> RolloutCache:
        """Pass the policy's turn to the environment, and open the next one."""
        cache: RolloutCache = self.rollout_cache
        action = self.tokenizer.decode(llm_output, skip_special_tokens=False)
        observation, reward, cache.terminated, cache.truncated, info = self.env.step(action=action)
        cache.step += 1
        if cache.step >= self.env_config["max_steps"] and not cache.terminated:
            cache.terminated = cache.truncated = True
        cache.history[-1].update(reward=reward, llm_response=action, **info)
        cache.history.append({"observation": observation, "messages": None})
        return cache

    def formulate_rollouts(self, rollout_cache: RolloutCache) -> RollDataProto:
        """The rollout of a trajectory. The last token of `scores` has the sum of the turns' rewards."""
        history = [turn for turn in rollout_cache.history if "llm_response" in turn]
        history[-1]  # ROLL reads the last turn: an IndexError if there was none
        step_scores = [turn["reward"] for turn in history]
        tokens = [token for turn in history for token in (*turn["prompt_ids"], *turn["response_ids"])]
        said = [[0] * len(turn["prompt_ids"]) + [1] * len(turn["response_ids"]) for turn in history]
        is_response = [bool(is_said) for turn in said for is_said in turn]
        count = len(tokens)
        batch = {
            "input_ids": self._padded(tokens, self.tokenizer.pad_token_id),
            "attention_mask": self._padded([1] * count),
            "response_mask": self._padded(is_response),
            "scores": self._padded([0.0] * (count - 1) + [float(sum(step_scores))]),
        }
        columns = {
            "tags": [rollout_cache.tag],
            "step_scores": [step_scores],
            "episode_scores": [sum(step_scores)],
        }
        values: dict[str, list[float]] = {"num_actions": [rollout_cache.step]}
        for turn in history:
            for name, value in turn.get("metrics", {}).items():
                values.setdefault(name, []).append(float(value))
        metrics = {f"env/{rollout_cache.tag}/{name}": statistics.fmean(several) for name, several in values.items()}
        return RollDataProto.from_dict(batch, columns, {"metrics": metrics})

    def _padded(self, values: Sequence[Any], padding: Any = 0) -> Any:
        cut = np.array(values[: self.sequence_length])
        kind = np.float32 if cut.dtype == np.float64 else cut.dtype
        whole = np.full((1, self.sequence_length), padding, dtype=kind)
        whole[0, : len(cut)] = cut
        return torch.tensor(whole)
