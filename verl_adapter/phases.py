"""Tells reward workers when verl asks for rewards and when it trains, for judges on the trainer's GPUs (verl 0.9.1).

The trainer's process knows both. It puts its inference engines to sleep when a batch is generated, and by then every
trajectory has its reward, in every reward worker; it wakes them by updating their weights, when the actor's memory is
free again (checkpoint_engine/base.py: `CheckpointEngineManager`). With a colocated reward model of verl's own, rewards
are asked for only in `RewardLoopManager.compute_rm_score`, while the inference engines sleep.

All of this happens only in a run with a source of `colocated: true`. Both calls wait for every worker, and their errors
end the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .trainers import Name, found, wrap

_CHECKPOINTS = ("verl.checkpoint_engine", "CheckpointEngineManager")
_CUSTOM_MANAGER = "actor_rollout_ref.rollout.checkpoint_manager_class"

BEGIN = ("begin_rewards",)
END = ("settle_rewards", "end_rewards")
"""The methods of `RewardEngine` that begin and end a reward phase. All workers have done one before any does the
next: servers that one of them put to sleep could not answer the calls of another.
"""

UNKNOWN = "the reward workers are not told when verl trains; only the trainers of verl 0.9 are known to tell it."
REMEDY = "Give the judge devices of its own, and remove the key."

_followed: list[Any] = []
"""The `RewardLoopManager` whose workers are told; one at most, because a process has one trainer."""


def problem_of(config: DictConfig, trainer: Name) -> str:
    """Why judges cannot share the GPUs of this trainer, as a sentence; "" if they can."""
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode") or "sync") if trainer == "v1" else ""
    if trainer not in ("v1", "legacy") or mode not in ("", "sync", "colocate_async"):
        return f"verl's trainer {mode or trainer} asks for rewards while it trains; no time is left for the judge."
    custom = OmegaConf.select(config, _CUSTOM_MANAGER)
    if custom:
        return f"with {_CUSTOM_MANAGER}={custom}, it is not known when verl trains."
    manager = found(*_CHECKPOINTS)
    return "" if manager and {"sleep_replicas", "update_weights"} <= vars(manager).keys() else UNKNOWN


def follow(manager: Any) -> None:
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
