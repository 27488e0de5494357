"""verl's base class of reward managers, its registry, and the managers `naive` and `dapo`."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .reward_functions import default_compute_score
from .tensors import VerlTensor


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
    def assemble_rm_scores(cls, data: Any, scores: Sequence[Any]) -> VerlTensor:
        """Each score at the last token of its response: (rows, response length)."""
        prompts = data.batch["prompts"].shape[1]
        lengths = np.asarray(data.batch["attention_mask"])[:, prompts:].sum(axis=1)
        rewards = np.zeros(data.batch["responses"].shape, dtype=np.float32)
        rewards[np.arange(len(rewards)), lengths - 1] = float32_column(scores)
        return rewards.view(VerlTensor)


class NaiveRewardManager(RewardManagerBase):
    """`naive`: what the reward function returns is the score, or has it below `score`."""

    tools = True

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
        arguments, length = await self._arguments(data)
        score, info = _split(await self._call(arguments))
        return self._with_penalty(score, info, length)

    async def _arguments(self, data: Any) -> tuple[dict[str, Any], int]:
        """What the reward function is called with, and how many tokens the response has."""
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
        return arguments, int(length)

    async def _call(self, arguments: dict[str, Any]) -> Any:
        if self.is_async_reward_score:
            return await self.compute_score(**arguments)
        return await self.loop.run_in_executor(None, lambda: self.compute_score(**arguments))

    def _extra_info(self, columns: Any) -> dict[str, Any]:
        info: dict[str, Any] = columns.get("extra_info", {})
        if self.tools:
            info.update((columns.get("tool_extra_fields") or {}).items())
            info["num_turns"] = columns.get("__num_turns__")
            info["rollout_reward_scores"] = columns.get("reward_scores", {})
        return info

    def _with_penalty(self, score: Any, info: dict[str, Any], length: int) -> dict[str, Any]:
        return {"reward_score": score, "reward_extra_info": info}


class DAPORewardManager(NaiveRewardManager):
    """`dapo`: `naive` less a penalty for responses that come near the longest allowed."""

    tools = False

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, *rest: Any, **named: Any) -> None:
        super().__init__(config, tokenizer, compute_score, *rest, **named)
        kwargs = config.reward.get("reward_kwargs", {})
        self.overlong_buffer_cfg = kwargs.get("overlong_buffer_cfg", None)
        self.max_resp_len = kwargs.get("max_resp_len", None)
        check_overlong(self.overlong_buffer_cfg, self.max_resp_len)

    def _with_penalty(self, score: Any, info: dict[str, Any], length: int) -> dict[str, Any]:
        penalty, extra = overlong_penalty(self.overlong_buffer_cfg, self.max_resp_len, length)
        return {"reward_score": with_penalty(score, penalty), "reward_extra_info": info | extra}


def check_overlong(cfg: Any, max_resp_len: int | None) -> None:
    """What `dapo` asserts of its penalty for long responses. Raises `AssertionError`."""
    if cfg is not None and cfg.enable:
        assert max_resp_len is not None, f"max_resp_len must be provided if overlong_buffer_cfg={cfg}, but got None"
        assert max_resp_len >= cfg.len, "max_resp_len must be larger than overlong_buffer.len"
        assert cfg.len > 0, (
            "overlong_buffer.len must be positive when overlong penalty is enabled,"
            f"but got {cfg.len}."
            "To disable the overlong penalty, set overlong_buffer.enable = False"
        )


def overlong_penalty(cfg: Any, max_resp_len: Any, length: int) -> tuple[Any, dict[str, Any]]:
    """The penalty of a response of `length` tokens, None without one, and its extra info if that is logged."""
    if cfg is None or not cfg.enable:
        return None, {}
    # A length is a tensor in verl, so all that is made of it is float32.
    exceeds = np.float32(length - (max_resp_len - cfg.len))
    penalty: Any = min(-exceeds / np.float32(cfg.len) * np.float32(cfg.penalty_factor), 0)
    extra = {"overlong_reward": float(penalty), "overlong": bool(penalty < 0)}
    return penalty, extra if cfg.log else {}


def with_penalty(score: Any, penalty: Any) -> Any:
    """The score less a penalty, if there is one, as float32. Raises `TypeError` for a score that is no number."""
    if not isinstance(penalty, np.float32):
        return score if penalty is None else score + penalty
    if isinstance(score, str):
        raise TypeError('can only concatenate str (not "Tensor") to str')
    if not hasattr(score, "__float__"):
        raise TypeError(f"unsupported operand type(s) for +=: '{type(score).__name__}' and 'Tensor'")
    with np.errstate(over="ignore"):
        return float(np.float32(score) + penalty)


class GDPORewardManager(NaiveRewardManager):
    """`gdpo`: as `naive`, but the function gets the name of the experiment instead of the turns."""

    tools = False

    def _extra_info(self, columns: Any) -> dict[str, Any]:
        info = super()._extra_info(columns)
        info["experiment_name"] = self.config.trainer.experiment_name
        return info


class AsyncTokenBucket:
    """verl's: a burst of `rate_limit` tokens at first; waiters are in no order."""

    def __init__(self, rate_limit: float) -> None:
        self.rate_limit = self.tokens = rate_limit
        self._updated: float | None = None

    async def acquire(self, count: float) -> None:
        """Wait for so many tokens. More than a burst are taken at once, and paid for by the wait."""
        while True:
            now = asyncio.get_running_loop().time()
            elapsed = now - self._updated if self._updated is not None else 0.0
            self.tokens = min(self.rate_limit, self.tokens + elapsed * self.rate_limit)
            self._updated = now
            missing = count - self.tokens
            if missing <= 0 or count > self.rate_limit:
                self.tokens -= count
            if missing > 0:
                await asyncio.sleep(missing / self.rate_limit)
            if missing <= 0 or count > self.rate_limit:
                return


class RateLimitedRewardManager(NaiveRewardManager):
    """`rate_limited`: `naive` with limits for each reward worker, and 0.0 for whatever fails or takes too long."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, *rest: Any, **named: Any) -> None:
        super().__init__(config, tokenizer, compute_score, *rest, **named)
        reward = config.reward
        self.timeout = reward.get("timeout", 300.0)
        self._slots = asyncio.Semaphore(reward.get("max_concurrent", 1))
        tokens = reward.get("estimated_tokens_per_request", 2000)
        limits = ((reward.get("max_rpm", None), 1.0), (reward.get("max_tpm", None), tokens))
        self._buckets = [(AsyncTokenBucket(most / 60.0), count) for most, count in limits if most is not None]

    def _extra_info(self, columns: Any) -> dict[str, Any]:
        info: dict[str, Any] = columns.get("extra_info", {})
        info.update((columns.get("tool_extra_fields") or {}).items())
        return info

    async def run_single(self, data: Any) -> dict[str, Any]:
        arguments, length = await self._arguments(data)
        for bucket, count in self._buckets:
            await bucket.acquire(count)
        async with self._slots:
            try:
                score, info = _split(await asyncio.wait_for(self._call(arguments), self.timeout))
            except asyncio.TimeoutError:
                score, info = 0.0, {"timeout": True, "acc": 0.0}
            except Exception as error:
                score, info = 0.0, {"error": str(error), "acc": 0.0}
        return self._with_penalty(score, info, length)


class RemoteRewardManager(RewardManagerBase):
    """`remote`, which is not played: it scores in Ray workers of its own."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "verl's reward manager `remote` is not played by FakeVerlTrainer: it scores like `naive`, in processes"
        )

    async def run_single(self, data: Any) -> Any:
        raise NotImplementedError


MANAGERS: dict[str, type[Any]] = {
    "naive": NaiveRewardManager,
    "dapo": DAPORewardManager,
    "gdpo": GDPORewardManager,
    "rate_limited": RateLimitedRewardManager,
    "remote": RemoteRewardManager,
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
