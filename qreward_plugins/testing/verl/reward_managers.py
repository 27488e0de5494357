"""verl's base class of reward managers, its registries, and the manager `naive`."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..tensors import Tensor
from .reward_functions import default_compute_score


class RewardManagerBase(ABC):
    """`verl.experimental.reward_loop.reward_manager.base.RewardManagerBase`."""

    _class_initialized = False

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.loop = asyncio.get_running_loop()
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        cls._class_initialized = True

    @abstractmethod
    async def run_single(self, data: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: Sequence[Any]) -> Tensor:
        """Each score at the last token of its response: (rows, response length)."""
        prompts = data.batch["prompts"].shape[1]
        lengths = np.asarray(data.batch["attention_mask"])[:, prompts:].sum(axis=1)
        rewards = np.zeros(data.batch["responses"].shape, dtype=np.float32)
        rewards[np.arange(len(rewards)), lengths - 1] = float32_column(scores)
        return rewards.view(Tensor)


class NaiveRewardManager(RewardManagerBase):
    """`naive`: what the reward function returns is the score, or has it below `score`. A number is `acc`, too."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score or default_compute_score)
        router = {"reward_router_address": reward_router_address, "reward_model_tokenizer": reward_model_tokenizer}
        self._more = {} if reward_router_address is None else router

    async def run_single(self, data: Any) -> dict[str, Any]:
        item = data[-1:][0]
        ids = item.batch["responses"]
        length = item.batch["attention_mask"][-ids.shape[-1] :].sum()
        columns = item.non_tensor_batch
        info: dict[str, Any] = columns.get("extra_info", {})
        info.update(columns.get("tool_extra_fields") or {})
        info["num_turns"] = columns.get("__num_turns__")
        info["rollout_reward_scores"] = columns.get("reward_scores", {})
        arguments = {
            "data_source": columns["data_source"],
            "solution_str": self.tokenizer.decode(ids[:length], skip_special_tokens=True),
            "ground_truth": columns["reward_model"]["ground_truth"],
            "extra_info": info,
            **self._more,
        }
        if inspect.iscoroutinefunction(self.compute_score):
            result = await self.compute_score(**arguments)
        else:
            result = await self.loop.run_in_executor(None, lambda: self.compute_score(**arguments))
        score, told = (result["score"], dict(result)) if isinstance(result, dict) else (result, {"acc": result})
        return {"reward_score": score, "reward_extra_info": told}


class AbstractRewardManager(ABC):
    """`verl.workers.reward_manager.AbstractRewardManager` of verl 0.4 to 0.7: rewards of shape (rows, response length),
    with `return_dict` under `reward_tensor`, beside `reward_extra_info` by key.
    """

    @abstractmethod
    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        raise NotImplementedError


def not_played(name: str) -> type[Any]:
    """A manager of verl that this stand-in refuses by name when it is made."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"verl's reward manager `{name}` is not played by FakeVerlTrainer")

    return type(f"{name.title()}NotPlayed", (), {"__new__": refuse})


MANAGERS: Mapping[str, type[Any]] = {
    "naive": NaiveRewardManager,
    **{name: not_played(name) for name in ("dapo", "gdpo", "rate_limited", "remote")},
}
"""verl's own."""
BATCH_MANAGERS: Mapping[str, type[Any]] = {name: not_played(name) for name in ("naive", "dapo", "batch", "prime")}
"""Those of verl 0.4 to 0.7."""


class Registry:
    """verl's registry of reward managers."""

    def __init__(self, classes: Mapping[str, type[Any]]) -> None:
        self.classes: dict[str, type[Any]] = dict(classes)

    def register(self, name: str) -> Callable[[type[Any]], type[Any]]:
        """A decorator that registers a class. Raises `ValueError` if another one has the name."""

        def decorate(cls: type[Any]) -> type[Any]:
            known = self.classes.setdefault(name, cls)
            if known != cls:
                raise ValueError(f"reward manager {name} has already been registered: {known} vs {cls}")
            return cls

        return decorate

    def get(self, name: str) -> type[Any]:
        """The class of this name. Raises `ValueError`."""
        if name not in self.classes:
            raise ValueError(f"Unknown reward manager: {name}")
        return self.classes[name]


def float32_column(scores: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Scores as `torch.tensor(scores, dtype=torch.float32)` has them: 1e39 is infinite. Raises `TypeError` for what is
    no number.
    """
    for score in scores:
        if not hasattr(score, "__float__"):
            raise TypeError(f"must be real number, not {type(score).__name__}")
    with np.errstate(over="ignore"):
        return np.array([float(score) for score in scores], dtype=np.float64).astype(np.float32)
