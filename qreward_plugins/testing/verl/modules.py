"""The names that reward code imports from verl, for a test without verl; and Ray's, while a trainer is played."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..stand_in_modules import stand_in_modules
from .advantages import compute_advantage, compute_advantage_for_multi_trajectories
from .agent_loop import AgentLoopManager
from .base import Tracking
from .batch_contract import REGISTRY as BATCH_REGISTRY
from .batch_contract import AbstractRewardManager, BatchTrainer, batch_registry
from .checkpoints import MODULE as CHECKPOINTS
from .checkpoints import CheckpointEngineManager
from .legacy import MODULE as LEGACY
from .legacy import LegacyTrainer
from .metrics import validation_metrics
from .protocol import VerlDataProto, VerlDataProtoItem, pad_to_divisor
from .reward_functions import default_compute_score, get_custom_reward_fn, load_extern_object
from .reward_loop import MODULE as REWARD_LOOP
from .reward_loop import RewardLoopManager, RewardLoopWorker, load_manager, resolve_manager
from .reward_managers import MANAGERS, NaiveRewardManager, Registry, RewardManagerBase
from .transfer_queue import MODULE as REPLAY_BUFFER
from .transfer_queue import ReplayBuffer, TransferQueue
from .v1 import MODULE as V1
from .v1 import V1Trainer

_log = logging.getLogger("verl")

SEPARATION = "verl.experimental.separation.ray_trainer"
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_trainer"
ONE_STEP_OFF = "verl.experimental.one_step_off_policy.ray_trainer"
BATCH_CONTRACT = "verl.trainer.ppo.ray_trainer_0_4"
"""A name of our own, because the trainer of verl 0.4 to 0.7 has the same module name as that of 0.9."""
_OURS = ("verl_adapter",)
"""Packages that are imported again on the stand-ins, and restored afterwards."""

_registries: list[tuple[Registry, Registry]] = []


@contextmanager
def verl_stand_in(modules: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[TransferQueue]:
    """Let reward managers import a few names from where verl 0.9 has them, for a `FakeVerlTrainer`; also where verl is
    installed.

    They are `verl.DataProto`, both registries of reward managers (`register`, `get_reward_manager_cls`), their base
    classes and the managers (only `naive` and, of the older ones, `batch` can be made), `load_reward_manager`,
    `get_custom_reward_fn` and `resolve_reward_manager_cls`, `default_compute_score`, `load_extern_object`,
    `RewardLoopManager` and `RewardLoopWorker`, the trainers, `Tracking`, and `transfer_queue`. Anything else under
    `verl` is a `ModuleNotFoundError`. `modules` are there as well.

    As an import of verl does, entering it loads the entry points of the group `verl.plugins`
    (`VERL_USE_EXTERNAL_PLUGINS`) and the modules that `VERL_USE_EXTERNAL_MODULES` names. `verl_adapter` is imported
    anew on the stand-ins. A `FakeVerlTrainer` enters it by itself; a test does, in a fixture or in `conftest.py`, whose
    own modules import verl. Leaving it takes the modules away again. For one thread at a time.
    """
    queue, registry, batch = TransferQueue(), Registry(), batch_registry()
    for outer in _registries:
        for mine, theirs in zip((registry, batch), outer, strict=True):
            mine.classes |= {name: cls for name, cls in theirs.classes.items() if not _is_ours(cls)}
    contents = {**_contents(registry, batch, queue), **(modules or {})}
    path = str(Path(__file__).with_name("worker_path"))
    with stand_in_modules(contents, proof="verl", over_installed=True, anew=_OURS):
        sys.path.insert(0, path)
        _registries.append((registry, batch))
        try:
            _load_plugins()
            yield queue
        finally:
            _registries.remove((registry, batch))
            sys.path.remove(path)


def _is_ours(cls: type[Any]) -> bool:
    return cls.__module__.split(".")[0] in _OURS


def _contents(registry: Registry, batch: Registry, queue: TransferQueue) -> dict[str, Mapping[str, Any]]:
    loop = {"RewardLoopWorker": RewardLoopWorker, "RewardLoopManager": _anew(RewardLoopManager, registry=registry)}
    managers = {
        "DAPORewardManager": MANAGERS["dapo"],
        "NaiveRewardManager": NaiveRewardManager,
        "register": registry.register,
        "get_reward_manager_cls": registry.get,
    }
    legacy = _anew(LegacyTrainer, __module__=LEGACY, __name__="RayPPOTrainer")
    v1 = _anew(V1Trainer, __module__=V1, __name__="PPOTrainer")
    separate = {"advantages_of": SEPARATION}
    one_step_off = type("OneStepOffRayTrainer", (legacy,), {**separate, "__module__": ONE_STEP_OFF})
    fully_async = type("FullyAsyncTrainer", (legacy,), {**separate, "__module__": FULLY_ASYNC})
    advantages = {"compute_advantage": compute_advantage}
    validation = {"process_validation_metrics": validation_metrics}
    padding = {"pad_dataproto_to_divisor": pad_to_divisor}
    reward_loop = "verl.experimental.reward_loop"
    return {
        "verl": {"DataProto": VerlDataProto, "__version__": "0.9.1"},
        "verl.protocol": {"DataProto": VerlDataProto, "DataProtoItem": VerlDataProtoItem, **padding},
        CHECKPOINTS: {"CheckpointEngineManager": _anew(CheckpointEngineManager)},
        "verl.experimental": {},
        "verl.experimental.agent_loop": {},
        "verl.experimental.agent_loop.agent_loop": {"AgentLoopManager": _anew(AgentLoopManager)},
        reward_loop: loop,
        REWARD_LOOP: {**loop, **padding},
        f"{reward_loop}.reward_manager": managers,
        f"{reward_loop}.reward_manager.base": {"RewardManagerBase": RewardManagerBase},
        f"{reward_loop}.reward_manager.dapo": {"DAPORewardManager": MANAGERS["dapo"]},
        f"{reward_loop}.reward_manager.naive": {"NaiveRewardManager": NaiveRewardManager},
        f"{reward_loop}.reward_manager.registry": {"REWARD_MANAGER": registry.classes, **managers},
        "verl.experimental.fully_async_policy": {},
        FULLY_ASYNC: {"FullyAsyncTrainer": fully_async},
        "verl.experimental.one_step_off_policy": {},
        ONE_STEP_OFF: {"OneStepOffRayTrainer": one_step_off},
        "verl.experimental.separation": {},
        SEPARATION: {"compute_advantage": compute_advantage},
        "verl.trainer": {},
        "verl.trainer.ppo": {},
        LEGACY: {"RayPPOTrainer": legacy, **advantages, **validation, **padding},
        "verl.trainer.ppo.metric_utils": validation,
        "verl.trainer.ppo.reward": {
            "get_custom_reward_fn": get_custom_reward_fn,
            "load_reward_manager": partial(load_manager, registry),
            "resolve_reward_manager_cls": partial(resolve_manager, registry),
        },
        "verl.trainer.ppo.v1": {},
        V1: {
            "PPOTrainer": v1,
            "compute_advantage_for_multi_trajectories": compute_advantage_for_multi_trajectories,
            **validation,
        },
        REPLAY_BUFFER: {"ReplayBuffer": _anew(ReplayBuffer)},
        "verl.utils": {},
        "verl.utils.import_utils": {"load_extern_object": load_extern_object},
        "verl.utils.reward_score": {"default_compute_score": default_compute_score},
        "verl.utils.tensordict_utils": {"get_tensordict": dict},
        "verl.utils.tracking": {"Tracking": _anew(Tracking, logged=[])},
        "verl.workers": {},
        BATCH_REGISTRY: {
            "AbstractRewardManager": AbstractRewardManager,
            "get_reward_manager_cls": batch.get,
            "register": batch.register,
        },
        BATCH_CONTRACT: {"RayPPOTrainer": _anew(BatchTrainer, __module__=LEGACY, __name__="RayPPOTrainer")},
        "transfer_queue": {"kv_batch_get": queue.kv_batch_get, "kv_batch_put": queue.kv_batch_put},
    }


def _anew(cls: type[Any], **changed: Any) -> Any:
    """A class with the same methods as its own: what wraps them does so for as long as the stand-ins are there."""
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    name = changed.pop("__name__", cls.__name__)
    return type(name, (cls,), {**body, **changed})


def _load_plugins() -> None:
    for name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
        importlib.import_module(name)
    chosen = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip()
    if chosen.lower() == "none":
        return
    for plugin in entry_points(group="verl.plugins"):
        if chosen.lower() != "auto" and plugin.name not in [name.strip() for name in chosen.split(",")]:
            continue
        try:
            plugin.load()
        except Exception as error:  # verl says no more than this
            _log.debug("Failed to load plugin '%s': %s", plugin.name, error)
