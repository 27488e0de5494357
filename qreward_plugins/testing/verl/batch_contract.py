"""The rewards of verl 0.4 to 0.7: no reward workers, but a reward manager that is called with a whole batch, in the
trainer's process (trainer/ppo/reward.py and workers/reward_manager of those versions).
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..tensors import Tensor, as_float32
from .agent_loop import AgentLoopWorker
from .legacy import LegacyTrainer
from .protocol import VerlDataProto
from .reward_functions import bind, default_compute_score, load_extern_object
from .reward_managers import Registry, float32_column, not_played

VERSIONS = ("0.4", "0.5", "0.6", "0.7")
REGISTRY = "verl.workers.reward_manager"


class AbstractRewardManager(ABC):
    """`verl.workers.reward_manager.AbstractRewardManager`: rewards of shape (rows, response length), each at the last
    token of its response; with `return_dict` under `reward_tensor`, beside `reward_extra_info` by key.
    """

    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any = None, reward_fn_key: str = "data_source"
    ) -> None:
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        self.compute_score = compute_score or default_compute_score

    @abstractmethod
    def _scores(self, data: VerlDataProto, texts: Sequence[str]) -> Iterable[Any]:
        """What the reward function says of each row, asked when it is needed."""

    def __call__(self, data: VerlDataProto, return_dict: bool = False) -> Any:
        if "rm_scores" in data.batch:
            extra = {key: data.non_tensor_batch[key] for key in data.meta_info.get("reward_extra_keys", [])}
            there = data.batch["rm_scores"]
            return {"reward_tensor": there, "reward_extra_info": extra} if return_dict else there
        responses = data.batch["responses"]
        rewards = np.zeros(responses.shape, dtype=np.float32).view(Tensor)
        lengths = np.asarray(data.batch["attention_mask"])[:, data.batch["prompts"].shape[1] :].sum(axis=1)
        texts = [
            str(self.tokenizer.decode(row[:length], skip_special_tokens=True))
            for row, length in zip(responses, lengths, strict=True)
        ]
        infos: dict[str, list[Any]] = defaultdict(list)
        for row, result in enumerate(self._scores(data, texts)):
            score = _noted(result, infos)
            rewards[row, lengths[row] - 1] = as_float32(score)
        return {"reward_tensor": rewards, "reward_extra_info": infos} if return_dict else rewards


class NaiveBatchManager(AbstractRewardManager):
    """`naive`: one row after the other. A number has no `acc` in these versions."""

    def _scores(self, data: VerlDataProto, texts: Sequence[str]) -> Iterator[Any]:
        for item, text in zip(data, texts, strict=True):
            columns = item.non_tensor_batch
            info = columns.get("extra_info", {})
            info["num_turns"] = columns.get("__num_turns__")
            info["rollout_reward_scores"] = columns.get("reward_scores", {})
            yield self.compute_score(
                data_source=columns[self.reward_fn_key],
                solution_str=text,
                ground_truth=columns["reward_model"]["ground_truth"],
                extra_info=info,
            )


class BatchRewardManager(AbstractRewardManager):
    """`batch`: the reward function gets all rows at once."""

    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any, reward_fn_key: str = "data_source", **kwargs: Any
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.reward_kwargs = kwargs

    def _scores(self, data: VerlDataProto, texts: Sequence[str]) -> Iterator[Any]:
        columns: dict[str, Any] = data.non_tensor_batch
        extras = columns.get("extra_info", [{} for _ in range(len(data))])
        before = columns.get("reward_scores", [{} for _ in range(len(data))])
        for extra, scores in zip(extras, before, strict=True):
            extra["rollout_reward_scores"] = scores
        results = self.compute_score(
            data_sources=columns[self.reward_fn_key],
            solution_strs=list(texts),
            ground_truths=[item.non_tensor_batch["reward_model"].get("ground_truth") for item in data],
            extra_infos=extras,
            **self.reward_kwargs,
        )
        yield from (results[row] for row in range(len(data)))
        data.batch["acc"] = float32_column([each["score"] if isinstance(each, dict) else each for each in results])


def _noted(result: Any, infos: dict[str, list[Any]]) -> Any:
    if not isinstance(result, dict):
        return result
    for key, value in result.items():
        infos[key].append(value)
    return result["score"]


def batch_registry() -> Registry:
    """verl's registry of these managers."""
    return Registry(
        {
            "naive": NaiveBatchManager,
            "dapo": not_played("dapo", "it scores like `naive`, less a penalty by length"),
            "batch": BatchRewardManager,
            "prime": not_played("prime", "it scores like `naive`, in processes"),
        }
    )


def load_batch_manager(config: Any, tokenizer: Any, num_examine: int, reward: Any = None, **kwargs: Any) -> Any:
    """`load_reward_manager` of these versions. `reward`: a function in place of the configured one."""
    cls = sys.modules[REGISTRY].get_reward_manager_cls(config.reward_model.get("reward_manager") or "naive")
    node = config.get("custom_reward_function") or {}
    function = bind(reward, {}) if reward is not None else None
    if function is None and node.get("path"):
        raw = load_extern_object(node["path"], node.get("name") or "compute_score")
        function = bind(raw, dict(node.get("reward_kwargs", {})))
    return cls(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=function or default_compute_score,
        reward_fn_key=config.data.reward_fn_key,
        **kwargs,
    )


def compute_reward(data: VerlDataProto, reward_fn: Any) -> tuple[Any, dict[str, Any]]:
    """The rewards of a batch and its further values. A manager that raises is asked a second time, without
    `return_dict`; if it raises again, the run ends.
    """
    try:
        result = reward_fn(data, return_dict=True)
        return result["reward_tensor"], result.get("reward_extra_info", {})
    except Exception as error:
        print(f"Error in reward_fn: {error}")
        return reward_fn(data), {}


class BatchTrainer(LegacyTrainer):
    """`RayPPOTrainer` of verl 0.4 to 0.7."""

    advantages_of = "verl.trainer.ppo.ray_trainer"

    def _setup(self) -> None:
        self.reward_loop_manager = SimpleNamespace(reward_loop_workers=[], reward_loop_worker_handles=None)
        self.agent_loops = self._make_agent_loops(AgentLoopWorker(None, self._rng))
        kwargs = self.config.reward_model.get("reward_kwargs") or {}
        self.reward_fn, self.val_reward_fn = (
            load_batch_manager(self.config, self.tokenizer, examined, self.setup.reward, **kwargs)
            for examined in (0, 1)
        )

    async def aclose(self) -> None:
        """Close the reward managers that can be closed; verl never does."""
        for manager in (getattr(self, "reward_fn", None), getattr(self, "val_reward_fn", None)):
            close = getattr(manager, "close", None)
            if close is not None:
                await asyncio.get_running_loop().run_in_executor(None, close)

    def _scored(self, batch: VerlDataProto) -> VerlDataProto:
        if self._estimator == "remax":
            raise NotImplementedError("`remax` is played with the rewards of verl 0.9 only")
        return batch

    def _rewarded(self, batch: VerlDataProto, *, validates: bool) -> VerlDataProto:
        self.agent_loops.worker.reward_calls += 1
        if validates:
            result = self.val_reward_fn(batch, return_dict=True)
            rewards, infos = result["reward_tensor"], result.get("reward_extra_info", {})
        else:
            rewards, infos = compute_reward(batch, self.reward_fn)
        batch.batch["rm_scores"] = rewards
        batch.non_tensor_batch |= {key: np.array(values) for key, values in infos.items()}
        batch.meta_info["reward_extra_keys"] = list(infos)
        return batch


__all__ = ["REGISTRY", "VERSIONS", "BatchTrainer", "batch_registry", "compute_reward", "load_batch_manager"]
