"""The names that reward code imports from verl, for a test without verl; and Ray's, while a trainer is played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from typing import Any

from ..data_proto import VerlDataProto, VerlDataProtoItem
from ..fake_trainer import stand_in_modules
from . import reward_loop, trainers
from .agent_loop import AgentLoopManager
from .estimates import compute_advantage, compute_advantage_for_multi_trajectories, validation_metrics
from .reward_loop import NaiveRewardManager, Registry, RewardManagerBase
from .v1 import MODULE as V1
from .v1 import REPLAY_BUFFER, ReplayBuffer, TransferQueue, V1Trainer

_OURS = ("verl_adapter",)
"""Packages that are imported again on the stand-ins, and restored afterwards."""

_registries: list[Registry] = []


@contextmanager
def verl_stand_in(modules: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[TransferQueue]:
    """Let reward managers import a few names from where verl 0.9 has them, for a `FakeVerlTrainer`; also where verl is
    installed.

    They are `verl.DataProto`, the registry of reward managers (`register`, `get_reward_manager_cls`), their base class
    and `NaiveRewardManager`, `load_reward_manager`, `get_custom_reward_fn` and `resolve_reward_manager_cls`,
    `default_compute_score`, `load_extern_object`, `RewardLoopManager` and `RewardLoopWorker`, the trainers, `Tracking`,
    and `transfer_queue`. Anything else under `verl` is a `ModuleNotFoundError`. `modules` are there as well.

    As an import of verl does, entering it loads the entry points of the group `verl.plugins`. `verl_adapter` is
    imported anew on the stand-ins. A `FakeVerlTrainer` enters it by itself; a test does, in a fixture or in
    `conftest.py`, whose own modules import verl. Leaving it takes the modules away again. For one thread at a time.
    """
    queue, registry = TransferQueue(), Registry()
    for outer in _registries:
        registry.classes |= {
            name: cls for name, cls in outer.classes.items() if cls.__module__.split(".")[0] not in _OURS
        }
    contents = {**_contents(registry, queue), **(modules or {})}
    with stand_in_modules(contents, proof="verl", over_installed=True, anew=_OURS):
        _registries.append(registry)
        try:
            for plugin in entry_points(group="verl.plugins"):
                with suppress(Exception):  # verl goes on without it, too
                    plugin.load()
            yield queue
        finally:
            _registries.remove(registry)


def _contents(registry: Registry, queue: TransferQueue) -> Mapping[str, Mapping[str, Any]]:
    validation = {"process_validation_metrics": validation_metrics}
    managers = {
        "NaiveRewardManager": NaiveRewardManager,
        "register": registry.register,
        "get_reward_manager_cls": registry.get,
    }
    loops = {cls.__name__: _anew(cls) for cls in (reward_loop.RewardLoopWorker, reward_loop.RewardLoopManager)}
    return {
        "verl": {"DataProto": VerlDataProto, "__version__": "0.9.1"},
        "verl.protocol": {"DataProto": VerlDataProto, "DataProtoItem": VerlDataProtoItem},
        trainers.CHECKPOINTS: {"CheckpointEngineManager": _anew(trainers.CheckpointEngineManager)},
        trainers.AGENT_LOOP: {"AgentLoopManager": _anew(AgentLoopManager)},
        trainers.TRACKING: {"Tracking": _anew(trainers.Tracking)},
        trainers.LEGACY: {
            "RayPPOTrainer": _anew(trainers.LegacyTrainer),
            "compute_advantage": compute_advantage,
            **validation,
        },
        V1: {
            "PPOTrainer": _anew(V1Trainer),
            "compute_advantage_for_multi_trajectories": compute_advantage_for_multi_trajectories,
            **validation,
        },
        REPLAY_BUFFER: {"ReplayBuffer": _anew(ReplayBuffer)},
        reward_loop.MODULE: {**loops},
        "verl.experimental.reward_loop": loops,
        "verl.experimental.reward_loop.reward_manager": managers,
        "verl.experimental.reward_loop.reward_manager.base": {"RewardManagerBase": RewardManagerBase},
        reward_loop.REWARD: {
            "get_custom_reward_fn": reward_loop.get_custom_reward_fn,
            "load_reward_manager": registry.load,
            "resolve_reward_manager_cls": registry.resolve,
        },
        "verl.utils.import_utils": {"load_extern_object": reward_loop.load_extern_object},
        "verl.utils.reward_score": {"default_compute_score": reward_loop.default_compute_score},
        "verl.utils.tensordict_utils": {"get_tensordict": dict},
        "transfer_queue": {"kv_batch_get": queue.kv_batch_get, "kv_batch_put": queue.kv_batch_put},
    }


def _anew(cls: type[Any]) -> Any:
    """A class with the same methods as its own: what wraps them does so for as long as the stand-ins are there."""
    body = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (cls,), body)
