"""The trainer of a verl run: its configuration, how its process tells reward workers of it, and of its phases.

The experimental trainers derive from the legacy one and inherit `trainer.use_v1: true`, so that key says nothing about
them. So when verl starts its reward workers, `trainer_hooks` looks which trainer is calling, and notes it in their
configuration. The note also says that the hooks are in place: without it, nothing keeps failed samples out of training.
verl offers no such hooks, so functions of its modules and classes are wrapped (`wrap`).

In a run with a source of `colocated: true`, reward workers are told when verl asks for rewards and when it trains (verl
0.9.1). The trainer's process knows both. It puts its inference engines to sleep when a batch is generated, and by then
every trajectory has its reward, in every reward worker; it wakes them by updating their weights, when the actor's
memory is free again (checkpoint_engine/base.py: `CheckpointEngineManager`). With a colocated reward model of verl's
own, rewards are asked for only in `RewardLoopManager.compute_rm_score`, while the inference engines sleep. All calls
wait for every worker, and their errors end the run.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

LEGACY_MODULE = "verl.trainer.ppo.ray_trainer"
V1_MODULE = "verl.trainer.ppo.v1.trainer_base"

Name = Literal["v1", "legacy", "one_step_off", "fully_async"]

Wrapper = Callable[..., Any]
"""Replaces a function. Its first argument is that function; the others are those of the call."""

_KEY = "qreward_trainer"
_WRAPPED = "_qreward"
_LEGACY_SUBCLASSES: tuple[tuple[str, Name], ...] = (
    ("verl.experimental.fully_async_policy.", "fully_async"),
    ("verl.experimental.one_step_off_policy.", "one_step_off"),
)
_CHECKPOINTS = ("verl.checkpoint_engine", "CheckpointEngineManager")
_CUSTOM_MANAGER = "actor_rollout_ref.rollout.checkpoint_manager_class"

BEGIN = ("begin_rewards",)
END = ("settle_rewards", "end_rewards")
"""The methods of `RewardEngine` that begin and end a reward phase. All workers have done one before any does the
next: servers that one of them put to sleep could not answer the calls of another.
"""

_NO_PHASES = "the reward workers are not told when verl trains; only the trainers of verl 0.9 are known to tell it."
OWN_DEVICES = "Give the judge devices of its own, and remove the key."

_followed: list[Any] = []
"""The `RewardLoopManager` whose workers are told; one at most, because a process has one trainer."""


def processes_of(config: DictConfig) -> int:
    """How many processes share the limits: verl's number of reward workers."""
    workers = OmegaConf.select(config, "reward.num_workers") or OmegaConf.select(config, "reward_model.num_workers")
    return int(workers or 1)


def is_scored_at_once(config: DictConfig) -> bool:
    """Whether a whole batch is scored after the rollout, because verl's reward model and the rollout share the GPUs."""
    return bool(OmegaConf.select(config, "reward.reward_model.enable")) and not OmegaConf.select(
        config, "reward.reward_model.enable_resource_pool"
    )


def estimator_of(config: DictConfig) -> str:
    """The name of the advantage estimator."""
    return str(OmegaConf.select(config, "algorithm.adv_estimator") or "gae")


def trainer_of(config: DictConfig) -> Name | None:
    """The trainer that is noted in a reward worker's configuration; None if the trainer's process has no hooks."""
    noted: Name | None = config.get(_KEY)
    return noted


def with_trainer(config: DictConfig, trainer: Name) -> DictConfig:
    """A copy of verl's configuration that names the trainer, for reward workers."""
    copied = copy.deepcopy(config)
    OmegaConf.update(copied, _KEY, trainer, force_add=True)
    return copied


def calling_trainer() -> Name | None:
    """The trainer whose method is on the call stack, by its class; None if no known trainer is."""
    v1 = getattr(sys.modules.get(V1_MODULE), "PPOTrainer", ())
    legacy = getattr(sys.modules.get(LEGACY_MODULE), "RayPPOTrainer", ())
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, v1):
            return "v1"
        if isinstance(owner, legacy):
            homes = [cls.__module__ for cls in type(owner).__mro__]
            derived = (name for home in homes for start, name in _LEGACY_SUBCLASSES if home.startswith(start))
            return next(derived, "legacy")
        frame = frame.f_back
    return None


def found(module: str, name: str) -> Any:
    """What a module of verl defines by this name, after an import; None if this version of verl has none."""
    with suppress(ModuleNotFoundError):
        return getattr(import_module(module), name, None)
    return None


def wrap(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Wrap, once, a function that a module defines, or a class and the classes made of it; nothing if `owner` is None
    or has none of this name.
    """
    original = None if owner is None else vars(owner).get(name)
    if original is not None and not is_wrapped(owner, name):

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(replacement, _WRAPPED, True)
        setattr(owner, name, replacement)
    derived: list[type] = type.__subclasses__(owner) if isinstance(owner, type) else []
    for each in derived:
        wrap(each, name, wrapper)


def is_wrapped(owner: Any, name: str) -> bool:
    """Whether a function of a module or class is wrapped."""
    return owner is not None and bool(getattr(vars(owner).get(name), _WRAPPED, False))


def problem_of_phases(config: DictConfig, trainer: Name | None) -> str:
    """Why judges cannot share the GPUs of this trainer, as a sentence; "" if they can."""
    if trainer is None:
        return _NO_PHASES
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode") or "sync") if trainer == "v1" else ""
    if trainer not in ("v1", "legacy") or mode not in ("", "sync", "colocate_async"):
        return f"verl's trainer {mode or trainer} asks for rewards while it trains; no time is left for the judge."
    custom = OmegaConf.select(config, _CUSTOM_MANAGER)
    if custom:
        return f"with {_CUSTOM_MANAGER}={custom}, it is not known when verl trains."
    manager = found(*_CHECKPOINTS)
    return "" if manager and {"sleep_replicas", "update_weights"} <= vars(manager).keys() else _NO_PHASES


def follow_phases(manager: Any) -> None:
    """Tell the workers of a `RewardLoopManager` of every phase from now on."""
    _followed[:] = [manager]
    wrap(found(*_CHECKPOINTS), "sleep_replicas", functools.partial(_tell_after, END))
    wrap(found(*_CHECKPOINTS), "update_weights", functools.partial(_tell_after, BEGIN))


def tell_around(compute: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `compute_rm_score`: where a whole batch is scored at once, rewards are asked for only in it. Its output is
    kept for `batches.put_extra_info`.
    """
    is_phase = self in _followed and self.reward_loop_worker_handles is None
    if is_phase:
        _tell(self, BEGIN)
    self.qreward_output = compute(self, *args, **kwargs)
    if is_phase:
        _tell(self, END)
    return self.qreward_output


def with_phases(worker: type[Any]) -> type[Any]:
    """verl's class of reward workers, with a method that begins or ends a reward phase in one worker."""

    # Ray sends a class that is made here by value, so its workers need not have imported this module.
    class PhasedRewardLoopWorker(worker):  # type: ignore[misc]
        async def qreward_phase(self, step: str) -> None:
            await getattr(self.reward_manager.engine, step)()

    return PhasedRewardLoopWorker


def _tell(manager: Any, steps: tuple[str, ...]) -> None:
    import ray

    for step in steps:
        ray.get([worker.qreward_phase.remote(step) for worker in manager.reward_loop_workers])


def _tell_after(steps: tuple[str, ...], change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = change(*args, **kwargs)
    for manager in _followed:
        # Where rewards come after the inference engines sleep, these two are no phase.
        if manager.reward_loop_worker_handles is not None:
            _tell(manager, steps)
    return result
