"""verl's reward function as a source: where it runs, and how a worker process comes by it.

Sync functions run in worker processes that can be killed. What verl hands over is often not picklable (a function out
of a file that is no importable module), so a worker is told how verl itself finds the function and loads it anew.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qreward_plugins.config import FunctionSource as FunctionNode
from qreward_plugins.sources import FunctionSource

ComputeScore = Callable[..., Any]


def open_reward_function(
    name: str,
    node: FunctionNode,
    *,
    trainer: DictConfig | None,
    compute_score: ComputeScore | None,
    kwargs: Mapping[str, Any],
    processes: int = 1,
) -> FunctionSource:
    """The source that runs verl's reward function.

    Args:
        node: its configuration; sync functions run in worker processes unless `mode: thread` is asked for.
        trainer: verl's configuration, from which a worker process loads the function.
        compute_score: the function that verl loaded in this process.
        kwargs: what verl adds to every call (the router's address and the reward model's tokenizer).
        processes: how many reward workers there are; together they start no more workers than there are processors.
    """
    if node.workers is None:
        node = node.model_copy(update={"workers": max(1, (os.cpu_count() or 1) // processes)})
    here = partial(compute_score or _default(), **kwargs)
    custom = _custom_reward_function(trainer)
    bound_to_this_process = bool(kwargs) or (custom is None and isinstance(compute_score, partial))
    if _is_async(compute_score) or bound_to_this_process:
        node = node if _is_async(compute_score) else node.model_copy(update={"mode": "thread"})
        return FunctionSource(name, node, loader=lambda: here)
    return FunctionSource(name, node, loader=partial(load_reward_function, custom))


def load_reward_function(custom: Mapping[str, Any] | None) -> ComputeScore:
    """Load verl's reward function in this process: the custom one of `custom`, or verl's default."""
    if custom is None:
        return _default()
    from verl.trainer.ppo.reward import get_custom_reward_fn

    tree = {"custom_reward_function": custom}
    function = get_custom_reward_fn(OmegaConf.create({"reward": tree, **tree}))
    assert function is not None
    return function  # type: ignore[no-any-return]


def _default() -> ComputeScore:
    from verl.utils.reward_score import default_compute_score

    return default_compute_score  # type: ignore[no-any-return]


def _custom_reward_function(trainer: DictConfig | None) -> Mapping[str, Any] | None:
    if trainer is None:
        return None
    for key in ("reward.custom_reward_function", "custom_reward_function"):
        node = OmegaConf.select(trainer, key)
        if node is not None and node.get("path"):
            return OmegaConf.to_container(node, resolve=True)  # type: ignore[return-value]
    return None


def _is_async(function: ComputeScore | None) -> bool:
    while isinstance(function, partial):
        if function.args and callable(function.args[0]) and inspect.iscoroutinefunction(function.args[0]):
            return True
        function = function.func
    return inspect.iscoroutinefunction(function)
