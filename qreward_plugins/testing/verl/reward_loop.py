"""verl's reward managers and the workers in which they live (experimental/reward_loop), with the reward function that
they call (trainer/ppo/reward.py, utils/import_utils.py). Of the managers, `naive` is played.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..data_proto import Tensor, VerlColumns, VerlDataProto, as_float32
from .actors import Actor

MODULE = "verl.experimental.reward_loop.reward_loop"
REWARD = "verl.trainer.ppo.reward"

_PACKAGE, _FILE = "pkg://", "file://"


def load_extern_object(module_path: str, object_name: str) -> Any:
    """An object out of `pkg://a.b`, `/x.py` or `file:///x.py`.

    Raises `FileNotFoundError`, `RuntimeError` where the file cannot be executed, and `AttributeError`.
    """
    return getattr(_module(module_path), object_name)


def get_custom_reward_fn(config: Any) -> Callable[..., Any] | None:
    """The function that `reward.custom_reward_function` names, with its `reward_kwargs`. None: it names none."""
    node = config.reward.custom_reward_function
    if not node.path:
        return None
    return _bound(load_extern_object(node.path, node.name), dict(node.get("reward_kwargs", {})))


def default_compute_score(data_source: Any, *_: Any, **__: Any) -> Any:
    """verl's own reward function has graders for its data sets; there are none here."""
    raise NotImplementedError(
        f"Reward function is not implemented for {data_source=} (FakeVerlTrainer has none of verl's graders: hand it a "
        "function as `reward`, or set reward.custom_reward_function.path)"
    )


class RewardManagerBase(ABC):
    """`verl.experimental.reward_loop.reward_manager.base.RewardManagerBase`."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.loop = asyncio.get_running_loop()
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Called before each manager is used."""
        return

    @abstractmethod
    async def run_single(self, data: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: Sequence[Any]) -> Tensor:
        """Each score at the last token of its response: (rows, response length)."""
        prompts = data.batch["prompts"].shape[1]
        lengths = np.asarray(data.batch["attention_mask"])[:, prompts:].sum(axis=1)
        rewards = np.zeros(data.batch["responses"].shape, dtype=np.float32)
        rewards[np.arange(len(rewards)), lengths - 1] = [as_float32(score, may_overflow=True) for score in scores]
        return rewards.view(Tensor)


class NaiveRewardManager(RewardManagerBase):
    """`naive`: what the reward function returns is the score, or has it below `score`. A number is `acc`, too."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **_: Any) -> None:
        super().__init__(config, tokenizer, compute_score or default_compute_score)

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
        }
        if inspect.iscoroutinefunction(self.compute_score):
            result = await self.compute_score(**arguments)
        else:
            result = await self.loop.run_in_executor(None, lambda: self.compute_score(**arguments))
        score, told = (result["score"], dict(result)) if isinstance(result, dict) else (result, {"acc": result})
        return {"reward_score": score, "reward_extra_info": told}


NOT_PLAYED = ("dapo", "gdpo", "rate_limited", "remote")
"""Managers of verl that this stand-in refuses by name."""


class Registry:
    """verl's registry of reward managers."""

    def __init__(self) -> None:
        self.classes: dict[str, type[Any]] = {"naive": NaiveRewardManager}

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
        if name in NOT_PLAYED:
            raise NotImplementedError(f"verl's reward manager `{name}` is not played by FakeVerlTrainer")
        if name not in self.classes:
            raise ValueError(f"Unknown reward manager: {name}")
        return self.classes[name]

    def resolve(self, config: Any) -> type[Any]:
        """The class of the configured reward manager. Raises what verl raises."""
        chosen = config.reward.reward_manager
        if chosen.source == "register":
            return self.get(chosen.name)
        assert getattr(chosen.module, "path", None) is not None, "Module path is required when source='importlib'"
        return load_extern_object(chosen.module.path, chosen.name)  # type: ignore[no-any-return]

    def load(self, config: Any, tokenizer: Any, reward: Any = None, **named: Any) -> Any:
        """The reward manager itself. `reward`: a function in place of the configured one."""
        function = get_custom_reward_fn(config) if reward is None else _bound(reward, {})
        cls = self.resolve(config)
        return cls(config=config, tokenizer=tokenizer, compute_score=function or default_compute_score, **named)


class RewardLoopWorker:
    """One reward worker: an actor that has a reward manager."""

    played: Any
    """What the fake trainer plays with: its actors, its tokenizer, and the reward function that it was handed."""

    def __init__(self, config: Any, reward_router_address: str | None) -> None:
        self.config = config
        tokenizer = self.played.engine.tokenizer
        self.reward_manager = sys.modules[REWARD].load_reward_manager(
            config,
            tokenizer,
            reward=self.played.reward,
            reward_router_address=reward_router_address,
            reward_model_tokenizer=tokenizer if config.reward.reward_model.enable else None,
        )

    async def compute_score(self, data: VerlDataProto) -> Any:
        """The score of one trajectory. verl's own reward model is not played."""
        if self.config.reward.reward_model.enable and self.config.reward.custom_reward_function.path is None:
            raise NotImplementedError(
                "verl asks its own reward model here, and no reward manager; FakeVerlTrainer has no reward model"
            )
        return await self.reward_manager.run_single(data)

    async def aclose(self) -> None:
        """verl never closes a reward manager; one that can be is closed with the fake trainer."""
        close = getattr(self.reward_manager, "aclose", None)
        if close is not None:
            await close()


class RewardLoopManager:
    """Starts the reward workers, in the trainer's process."""

    played: Any
    """What the fake trainer plays with: its actors, its tokenizer, and the reward function that it was handed."""

    def __init__(self, config: Any, rm_resource_pool: Any = None) -> None:
        self.config = config
        self.reward_router_address = "fake-router:0" if config.reward.reward_model.enable else None
        # Looked up by their names in verl, because hooks may have replaced them there.
        self.reward_loop_workers_class = self.played.ray.remote(sys.modules[MODULE].RewardLoopWorker)
        self.reward_manager_cls = sys.modules[REWARD].resolve_reward_manager_cls(config)
        self._init_reward_loop_workers()

    @property
    def reward_loop_worker_handles(self) -> list[Actor] | None:
        """None where a colocated reward model takes turns with the rollout: batches are scored after it then."""
        model = self.config.reward.reward_model
        return self.reward_loop_workers if not model.enable or model.enable_resource_pool else None

    def _init_reward_loop_workers(self) -> None:
        self.reward_loop_workers: list[Actor] = [
            self.reward_loop_workers_class.remote(self.config, self.reward_router_address)
            for _ in range(self.config.reward.num_workers)
        ]

    def compute_rm_score(self, data: VerlDataProto) -> VerlDataProto:
        """The scores of a whole batch, which is dealt to the workers."""
        workers = self.reward_loop_workers
        calls = [workers[row % len(workers)].compute_score.remote(data[row : row + 1]) for row in range(len(data))]
        outputs = self.played.ray.get(calls)
        rewards = self.reward_manager_cls.assemble_rm_scores(data, [output["reward_score"] for output in outputs])
        infos = [output.get("reward_extra_info", {}) for output in outputs]
        columns = {key: np.array([info[key] for info in infos]) for key in infos[0]}
        return VerlDataProto(VerlColumns({"rm_scores": rewards}, len(data)), columns, {"reward_extra_keys": [*columns]})


def _bound(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with arguments that take precedence over those of a call."""
    call = _call_async if inspect.iscoroutinefunction(function) else _call
    return partial(call, function, dict(arguments))


def _call(function: Callable[..., Any], extra: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
    return function(*arguments, **{**named, **extra})


async def _call_async(function: Callable[..., Any], extra: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
    return await function(*arguments, **{**named, **extra})


def _module(path: str) -> Any:
    if path.startswith(_PACKAGE):
        return importlib.import_module(path[len(_PACKAGE) :].replace("/", "."))
    path = path.removeprefix(_FILE)
    if not os.path.exists(path):
        raise FileNotFoundError(f"Custom module file not found: module_path={path!r}")
    spec = importlib.util.spec_from_file_location("custom_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RuntimeError(f"Error loading module from module_path={path!r}") from error
    return module
