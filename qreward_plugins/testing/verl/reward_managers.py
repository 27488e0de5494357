"""verl's base class of reward managers, its registry, and the manager `naive`."""

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
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score
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
    """`naive`: what the reward function returns is the score, or has it below `score`."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.compute_score = compute_score or default_compute_score
        self.is_async_reward_score = _is_async(self.compute_score)
        self.reward_router_address = reward_router_address
        self.reward_model_tokenizer = reward_model_tokenizer

    async def run_single(self, data: Any) -> dict[str, Any]:
        arguments = await self._arguments(data)
        score, info = _split(await self._call(arguments))
        return {"reward_score": score, "reward_extra_info": info}

    async def _arguments(self, data: Any) -> dict[str, Any]:
        """What the reward function is called with."""
        item = data[-1:][0]
        ids = item.batch["responses"]
        length = item.batch["attention_mask"][-ids.shape[-1] :].sum()
        columns = item.non_tensor_batch
        arguments = {
            "data_source": columns["data_source"],
            "ground_truth": columns["reward_model"]["ground_truth"],
            "extra_info": self._extra_info(columns),
        }
        arguments["solution_str"] = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.decode(ids[:length], skip_special_tokens=True)
        )
        if self.reward_router_address is not None:
            arguments["reward_router_address"] = self.reward_router_address
            arguments["reward_model_tokenizer"] = self.reward_model_tokenizer
        return arguments

    async def _call(self, arguments: dict[str, Any]) -> Any:
        if self.is_async_reward_score:
            return await self.compute_score(**arguments)
        return await self.loop.run_in_executor(None, lambda: self.compute_score(**arguments))

    def _extra_info(self, columns: Any) -> dict[str, Any]:
        info: dict[str, Any] = columns.get("extra_info", {})
        info.update((columns.get("tool_extra_fields") or {}).items())
        info["num_turns"] = columns.get("__num_turns__")
        info["rollout_reward_scores"] = columns.get("reward_scores", {})
        return info


def not_played(name: str, hint: str) -> type[Any]:
    """A manager of verl that this stand-in refuses by name when it is made."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"verl's reward manager `{name}` is not played by FakeVerlTrainer: {hint}")

    return type(f"{name.title()}NotPlayed", (), {"__new__": refuse})


MANAGERS: dict[str, type[Any]] = {
    "naive": NaiveRewardManager,
    "dapo": not_played("dapo", "it scores like `naive`, less a penalty by length"),
    "gdpo": not_played("gdpo", "it scores like `naive`, for an estimator that is not played"),
    "rate_limited": not_played("rate_limited", "it scores like `naive`, slower"),
    "remote": not_played("remote", "it scores like `naive`, in processes"),
}


class Registry:
    """verl's registry of reward managers."""

    def __init__(self, classes: Mapping[str, type[Any]] | None = None) -> None:
        self.classes: dict[str, type[Any]] = dict(classes if classes is not None else MANAGERS)

    def register(self, name: str) -> Callable[[type[Any]], type[Any]]:
        """A decorator that registers a class. Raises `ValueError` if another one has the name."""

        def decorate(cls: type[Any]) -> type[Any]:
            known = self.classes.get(name)
            if known is not None and known != cls:
                raise ValueError(f"reward manager {name} has already been registered: {known} vs {cls}")
            self.classes[name] = cls
            return cls

        return decorate

    def get(self, name: str) -> type[Any]:
        """The class of this name. Raises `ValueError`."""
        if name not in self.classes:
            raise ValueError(f"Unknown reward manager: {name}")
        return self.classes[name]


def float32_column(scores: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Scores as `torch.tensor(scores, dtype=torch.float32)` has them: 1e39 is infinite.

    Raises `TypeError` for what is no number, and `ValueError` where the first is a text.
    """
    for score in scores:
        if isinstance(scores[0], str):
            raise ValueError("too many dimensions 'str'")
        if score is None or not hasattr(score, "__float__"):
            raise TypeError(f"must be real number, not {type(score).__name__}")
    with np.errstate(over="ignore"):
        return np.array([float(score) for score in scores], dtype=np.float64).astype(np.float32)


def _split(result: Any) -> tuple[Any, dict[str, Any]]:
    """The score in what a reward function returned, and all its values; a number is `acc`."""
    return (result["score"], dict(result)) if isinstance(result, dict) else (result, {"acc": result})


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function)
