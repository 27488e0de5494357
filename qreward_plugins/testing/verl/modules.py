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
from . import reward_loop, trainers
from .advantages import compute_advantage, compute_advantage_for_multi_trajectories
from .agent_loop import AgentLoopManager
from .metrics import validation_metrics
from .protocol import VerlDataProto, VerlDataProtoItem, pad_to_divisor
from .replay_buffer import MODULE as REPLAY_BUFFER
from .replay_buffer import ReplayBuffer, TransferQueue
from .reward_functions import default_compute_score, get_custom_reward_fn, load_extern_object
from .reward_managers import BATCH_MANAGERS, MANAGERS, AbstractRewardManager, Registry, RewardManagerBase
from .v1 import MODULE as V1
from .v1 import V1Trainer

_log = logging.getLogger("verl")

TRAINERS = {
    "v1": (V1, "PPOTrainer"),
    "legacy": (trainers.LEGACY, "RayPPOTrainer"),
    "one_step_off": ("verl.experimental.one_step_off_policy.ray_trainer", "OneStepOffRayTrainer"),
    "fully_async": ("verl.experimental.fully_async_policy.fully_async_trainer", "FullyAsyncTrainer"),
    # A name of our own, because the trainer of verl 0.4 to 0.7 has the same module name as that of 0.9.
    "batch": ("verl.trainer.ppo.ray_trainer_0_4", "RayPPOTrainer"),
}
"""The trainers, by module and name."""
_OURS = ("verl_adapter",)
"""Packages that are imported again on the stand-ins, and restored afterwards."""

_registries: list[tuple[Registry, Registry]] = []


@contextmanager
def verl_stand_in(modules: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[TransferQueue]:
    """Let reward managers import a few names from where verl 0.9 has them, for a `FakeVerlTrainer`; also where verl is
    installed.

    They are `verl.DataProto`, both registries of reward managers (`register`, `get_reward_manager_cls`), their base
    classes and the managers (only `naive` can be made), `load_reward_manager`, `get_custom_reward_fn` and
    `resolve_reward_manager_cls`, `default_compute_score`, `load_extern_object`, `RewardLoopManager` and
    `RewardLoopWorker`, the trainers, `Tracking`, and `transfer_queue`. Anything else under `verl` is a
    `ModuleNotFoundError`. `modules` are there as well.

    As an import of verl does, entering it loads the entry points of the group `verl.plugins`
    (`VERL_USE_EXTERNAL_PLUGINS`) and the modules that `VERL_USE_EXTERNAL_MODULES` names. `verl_adapter` is imported
    anew on the stand-ins. A `FakeVerlTrainer` enters it by itself; a test does, in a fixture or in `conftest.py`, whose
    own modules import verl. Leaving it takes the modules away again. For one thread at a time.
    """
    queue, registry, batch = TransferQueue(), Registry(MANAGERS), Registry(BATCH_MANAGERS)
    for outer in _registries:
        for mine, theirs in zip((registry, batch), outer, strict=True):
            ours = {name for name, cls in theirs.classes.items() if cls.__module__.split(".")[0] in _OURS}
            mine.classes |= {name: cls for name, cls in theirs.classes.items() if name not in ours}
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


def _contents(registry: Registry, batch: Registry, queue: TransferQueue) -> Mapping[str, Mapping[str, Any]]:
    loop = {
        "RewardLoopWorker": _anew(reward_loop.RewardLoopWorker),
        "RewardLoopManager": _anew(reward_loop.RewardLoopManager),
    }
    managers = {
        "NaiveRewardManager": MANAGERS["naive"],
        "register": registry.register,
        "get_reward_manager_cls": registry.get,
    }
    legacy = _anew(trainers.LegacyTrainer, *TRAINERS["legacy"])
    separated = type("Separated", (legacy,), {"advantages_of": trainers.SEPARATION})
    validation = {"process_validation_metrics": validation_metrics}
    padding = {"pad_dataproto_to_divisor": pad_to_divisor}
    home = "verl.experimental.reward_loop"
    contents: dict[str, dict[str, Any]] = {
        "verl": {"DataProto": VerlDataProto, "__version__": "0.9.1"},
        "verl.protocol": {"DataProto": VerlDataProto, "DataProtoItem": VerlDataProtoItem, **padding},
        trainers.CHECKPOINTS: {"CheckpointEngineManager": _anew(trainers.CheckpointEngineManager)},
        trainers.AGENT_LOOP: {"AgentLoopManager": _anew(AgentLoopManager)},
        trainers.SEPARATION: {"compute_advantage": compute_advantage},
        trainers.TRACKING: {"Tracking": _anew(trainers.Tracking)},
        home: loop,
        reward_loop.MODULE: {**loop, **padding},
        f"{home}.reward_manager": managers,
        f"{home}.reward_manager.base": {"RewardManagerBase": RewardManagerBase},
        f"{home}.reward_manager.naive": {"NaiveRewardManager": MANAGERS["naive"]},
        f"{home}.reward_manager.registry": {"REWARD_MANAGER": registry.classes, **managers},
        trainers.LEGACY: {"compute_advantage": compute_advantage, **validation, **padding},
        V1: {"compute_advantage_for_multi_trajectories": compute_advantage_for_multi_trajectories, **validation},
        REPLAY_BUFFER: {"ReplayBuffer": _anew(ReplayBuffer)},
        reward_loop.REWARD: {
            "get_custom_reward_fn": get_custom_reward_fn,
            "load_reward_manager": partial(reward_loop.load_manager, registry),
            "resolve_reward_manager_cls": partial(reward_loop.resolve_manager, registry),
        },
        "verl.utils.import_utils": {"load_extern_object": load_extern_object},
        "verl.utils.reward_score": {"default_compute_score": default_compute_score},
        "verl.utils.tensordict_utils": {"get_tensordict": dict},
        trainers.BATCH_REGISTRY: {
            "AbstractRewardManager": AbstractRewardManager,
            "get_reward_manager_cls": batch.get,
            "register": batch.register,
        },
        "transfer_queue": {"kv_batch_get": queue.kv_batch_get, "kv_batch_put": queue.kv_batch_put},
    }
    made = {"v1": V1Trainer, "one_step_off": separated, "fully_async": separated, "batch": trainers.BatchTrainer}
    for trainer, (module, name) in TRAINERS.items():
        cls = _anew(made[trainer], module, name) if trainer in made else legacy
        contents.setdefault(module, {})[name] = cls
    return contents


def _anew(cls: type[Any], module: str = "", name: str = "") -> Any:
    """A class with the same methods as its own: what wraps them does so for as long as the stand-ins are there."""
    body = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    return type(name or cls.__name__, (cls,), {**body, "__module__": module or cls.__module__})


def _load_plugins() -> None:
    for name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
        importlib.import_module(name)
    chosen = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip()
    names = [name.strip() for name in chosen.split(",")]
    for plugin in entry_points(group="verl.plugins") if chosen.lower() != "none" else ():
        if chosen.lower() == "auto" or plugin.name in names:
            try:
                plugin.load()
            except Exception as error:  # verl says no more than this
                _log.debug("Failed to load plugin '%s': %s", plugin.name, error)
