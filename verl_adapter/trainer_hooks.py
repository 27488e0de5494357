"""Wraps functions of verl in the trainer's process, because verl (0.9) has no hooks for missing rewards.

This happens only in a run whose reward manager is ours, in the processes that start reward workers or a tracker (the
fully asynchronous trainer has one for each):

- A configuration that asks no reward manager, or would end the run later, ends the run before training.
- Reward workers learn their trainer, and that it has these hooks.
- Reward workers are told when the trainer asks for rewards, if a judge sleeps while it trains (`trainers`).
- Failed samples are kept out of advantages (`advantages`), of the means of a validation (`metrics`), and of the
  filter of groups (`batches`).
- Agent loops tell which tokens the policy wrote, if a judge says what each turn is worth (`rollouts`).
- Rows of validation are marked, because a reward manager cannot recognise them.
- The tracker gets metrics of what was scored (`metrics`).

If a version of verl lacks what keeps failed samples out, reward workers refuse `on_failure: auto`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from omegaconf import OmegaConf

from qreward_plugins import Config
from qreward_plugins.adapters import colocated_sources

from . import metrics
from .advantages import Advantages
from .batches import filter_scored_rows, put_extra_info
from .metrics import RewardLog
from .rollouts import needs_policy_spans, tell_turns
from .settings import load_settings
from .startup import refuse_impossible, refuse_old_key, refuse_unserved
from .trainers import (
    LEGACY_MODULE,
    V1_MODULE,
    Name,
    Wrapper,
    calling_trainer,
    estimator_of,
    follow_phases,
    found,
    is_wrapped,
    tell_around,
    with_phases,
    with_trainer,
    wrap,
)

_REPLAY_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
_REWARD_LOOP = "verl.experimental.reward_loop.reward_loop"
_AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"
_SEPARATED = "verl.experimental.separation.ray_trainer"

_COMPUTES: dict[Name, tuple[str, str]] = {
    "v1": (V1_MODULE, "compute_advantage_for_multi_trajectories"),
    "legacy": (LEGACY_MODULE, "compute_advantage"),
    # The experimental trainers have the function under a name of their own module.
    "one_step_off": (_SEPARATED, "compute_advantage"),
    "fully_async": (_SEPARATED, "compute_advantage"),
}
"""The module and the name by which each trainer computes advantages."""


def install() -> None:
    """Wrap the functions of verl that start reward workers and trackers. A second call changes nothing."""
    manager, tracking = found(_REWARD_LOOP, "RewardLoopManager"), found("verl.utils.tracking", "Tracking")
    wrap(manager, "__init__", _check)
    wrap(manager, "_init_reward_loop_workers", _follow)
    wrap(tracking, "__init__", _attach)
    wrap(tracking, "log", _add_metrics)


def attach(settings: Config, estimator: str = "") -> RewardLog:
    """Wrap the trainers that are loaded in this process; return what they log of rewards. `estimator`: the name of the
    advantage estimator.
    """
    if not _attached:
        log = RewardLog()
        _attached.append((log, Advantages(settings, log)))
    log, advantages = _attached[0]
    with_means = partial(metrics.with_means, log)
    hooks: list[tuple[str, str, str, Wrapper]] = [
        (LEGACY_MODULE, "", "compute_advantage", advantages.by_columns),
        (_SEPARATED, "", "compute_advantage", advantages.by_columns),
        (V1_MODULE, "", "compute_advantage_for_multi_trajectories", advantages.by_keys),
        (LEGACY_MODULE, "", "process_validation_metrics", with_means),
        (V1_MODULE, "", "process_validation_metrics", with_means),
        (LEGACY_MODULE, "RayPPOTrainer", "_validate", metrics.mark_rows),
        (V1_MODULE, "PPOTrainer", "_validate", metrics.mark_rows),
        (_REPLAY_BUFFER, "ReplayBuffer", "_dapo_filtered_keys", partial(filter_scored_rows, advantages.has_none)),
        (_REWARD_LOOP, "RewardLoopManager", "compute_rm_score", tell_around),
        (V1_MODULE, "PPOTrainer", "_compute_reward_colocate", put_extra_info),
    ]
    if estimator == "remax":
        # Not for the others: some trainers await it, and whether it returns an awaitable depends on its direct caller.
        hooks.append((_AGENT_LOOP, "AgentLoopManager", "generate_sequences", advantages.of_greedy))
    if needs_policy_spans(settings):
        found(_AGENT_LOOP, "AgentLoopManager")  # the legacy trainer imports it later, and uses what is wrapped by then
        hooks.append((_AGENT_LOOP, "AgentLoopManager", "_init_agent_loop_workers", tell_turns))
    # On each call, because a trainer may have been imported since the last one.
    for module, cls, name, wrapper in hooks:
        home = sys.modules.get(module)
        wrap(getattr(home, cls, None) if cls else home, name, wrapper)
    return log


_attached: list[tuple[RewardLog, Advantages]] = []
"""What the wrappers of this process share: it has one trainer."""


def _check(start: Callable[..., Any], self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps `RewardLoopManager.__init__`: a mistake ends the run here, and reward workers learn their trainer."""
    self._qreward_phases = False
    if _uses_qreward(config):
        trainer, self._qreward_phases = _checked_trainer(config)
        config = config if trainer is None else with_trainer(config, trainer)
    else:
        refuse_old_key(config)
    start(self, config, *args, **kwargs)


def _follow(start: Callable[..., Any], self: Any) -> None:
    """Wraps `RewardLoopManager._init_reward_loop_workers`: the trainer tells the workers when it trains."""
    # Without, if this module was imported meanwhile.
    if getattr(self, "_qreward_phases", False):
        import ray

        self.reward_loop_workers_class = ray.remote(with_phases(found(_REWARD_LOOP, "RewardLoopWorker")))
        follow_phases(self)
    start(self)


def _attach(start: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps `Tracking.__init__`: the process with a tracker wraps what computes advantages and validates."""
    start(self, *args, **kwargs)
    config = kwargs.get("config", args[3] if len(args) > 3 else None)
    self._qreward_log = None
    if _uses_qreward(config):
        tree = OmegaConf.create(config)
        self._qreward_log = attach(load_settings(tree), estimator_of(tree))


def _add_metrics(
    log: Callable[..., Any], self: Any, data: Mapping[str, Any], step: int, *args: Any, **kwargs: Any
) -> None:
    """Wraps `Tracking.log`: it also gets what was seen of rewards."""
    rewards = getattr(self, "_qreward_log", None)
    log(self, {**data, **rewards.since_last()} if rewards is not None else data, step, *args, **kwargs)


def _checked_trainer(config: Any) -> tuple[Name | None, bool]:
    """The trainer that starts reward workers, with our hooks in place; None if it is unknown. And whether they must be
    told of its phases. Raises `ConfigurationError`: in a reward worker a mistake would show only with the first sample,
    as its failure.
    """
    name = calling_trainer()
    refuse_impossible(config, name)
    settings = load_settings(config)
    attach(settings, estimator_of(config))
    if name is not None and not is_wrapped(sys.modules.get(_COMPUTES[name][0]), _COMPUTES[name][1]):
        name = None
    refuse_unserved(settings, config, name)
    return name, bool(colocated_sources(settings))


def _uses_qreward(config: Any) -> bool:
    """Whether a trainer's configuration selects our reward manager or a subclass of it."""
    try:
        from verl.trainer.ppo.reward import resolve_reward_manager_cls

        chosen = resolve_reward_manager_cls(OmegaConf.create(config))
    except Exception:  # the tracker of another program, such as supervised training, or an older verl
        return False
    return bool(getattr(chosen, "needs_trainer_hooks", False))
