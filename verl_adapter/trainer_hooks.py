"""Wraps functions of verl in the trainer's process, because verl (0.9) has no hooks for missing rewards.

This happens only in a run whose reward manager is ours, in the processes that start reward workers or a tracker (the
fully asynchronous trainer has one for each):

- A configuration that asks no reward manager, or would end the run later, ends the run before training.
- Reward workers learn their trainer, and that it has these hooks.
- Reward workers are told when the trainer asks for rewards, if a judge sleeps while it trains (`phases`).
- Failed samples are kept out of advantages (`advantages`), of the means of a validation (`validation`), and of the
  filter of groups (`queue`).
- Agent loops tell which tokens the policy wrote, if a judge says what each turn is worth (`response_tokens`).
- Rows of validation are marked, because a reward manager cannot recognise them.
- The tracker gets metrics of what was scored (`metrics`).

If a version of verl lacks what keeps failed samples out, reward workers refuse `on_failure: auto`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf

from qreward_plugins import Config
from qreward_plugins.adapters import colocated_sources, without_colocated

from . import phases, validation
from .advantages import Advantages
from .metrics import RewardLog
from .queue import of_scored_rows, with_extra_info
from .response_tokens import needs_policy_spans, telling_turns
from .settings import estimator_of, load_settings
from .startup import refuse_impossible, refuse_old_key, refuse_unserved
from .trainers import (
    LEGACY_MODULE,
    V1_MODULE,
    Name,
    Trainer,
    Wrapper,
    calling_trainer,
    is_wrapped,
    with_trainer,
    wrap,
    wrap_classes,
)

_log = logging.getLogger("verl_adapter")

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
    with suppress(ImportError):
        from verl.experimental.reward_loop.reward_loop import RewardLoopManager

        if wrap(RewardLoopManager, "_init_reward_loop_workers", _informing_workers):
            wrap(RewardLoopManager, "__init__", _checking)
    with suppress(ImportError):
        from verl.utils.tracking import Tracking

        wrap(Tracking, "__init__", _attaching)
        wrap(Tracking, "log", _with_metrics)


def attach(settings: Config, estimator: str = "") -> RewardLog:
    """Wrap the trainers that are loaded in this process; return what they log of rewards. `estimator`: the name of the
    advantage estimator.
    """
    if not _attached:
        log = RewardLog()
        _attached.append((log, Advantages(settings, log)))
    log, advantages = _attached[0]
    validating = functools.partial(validation.with_means, log)
    hooks: tuple[tuple[str, str, str, Wrapper], ...] = (
        (LEGACY_MODULE, "", "compute_advantage", advantages.by_columns),
        (_SEPARATED, "", "compute_advantage", advantages.by_columns),
        (V1_MODULE, "", "compute_advantage_for_multi_trajectories", advantages.by_keys),
        (LEGACY_MODULE, "", "process_validation_metrics", validating),
        (V1_MODULE, "", "process_validation_metrics", validating),
        (LEGACY_MODULE, "RayPPOTrainer", "_validate", validation.marking),
        (V1_MODULE, "PPOTrainer", "_validate", validation.marking),
        (_REPLAY_BUFFER, "ReplayBuffer", "_dapo_filtered_keys", of_scored_rows),
        (_REWARD_LOOP, "RewardLoopManager", "compute_rm_score", phases.telling_around),
        (V1_MODULE, "PPOTrainer", "_compute_reward_colocate", with_extra_info),
    )
    if estimator == "remax":
        # Not for the others: some trainers await it, and whether it returns an awaitable depends on its direct caller.
        hooks += ((_AGENT_LOOP, "AgentLoopManager", "generate_sequences", advantages.of_greedy),)
    # On each call, because a trainer may have been imported since the last one.
    for module, cls, name, wrapper in hooks:
        home = sys.modules.get(module)
        if cls:
            wrap_classes(getattr(home, cls, None), name, wrapper)
        else:
            wrap(home, name, wrapper)
    if needs_policy_spans(settings):
        # The legacy trainer imports it later, and uses what is wrapped by then.
        with suppress(ImportError):
            wrap_classes(import_module(_AGENT_LOOP).AgentLoopManager, "_init_agent_loop_workers", telling_turns)
    return log


_attached: list[tuple[RewardLog, Advantages]] = []
"""What the wrappers of this process share: it has one trainer."""


def _checking(start: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `RewardLoopManager.__init__`: a mistake ends the run here."""

    @functools.wraps(start)
    def checked(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        uses_qreward = _uses_qreward(config)
        if not uses_qreward:
            refuse_old_key(config)
        self._qreward_trainer = _checked_trainer(config) if uses_qreward else None
        start(self, config, *args, **kwargs)

    return checked


def _informing_workers(start: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `RewardLoopManager._init_reward_loop_workers`: the workers learn their trainer."""

    @functools.wraps(start)
    def informed(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        if getattr(self, "_qreward_trainer", None) is None:
            return start(self, *args, **kwargs)
        if self._qreward_trainer.tells_phases:
            import ray

            worker = sys.modules[_REWARD_LOOP].RewardLoopWorker
            self.reward_loop_workers_class = ray.remote(phases.with_phases(worker))
            phases.follow(self)
        self.config = with_trainer(config, self._qreward_trainer)
        try:
            return start(self, *args, **kwargs)
        finally:
            self.config = config

    return informed


def _attaching(start: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tracking.__init__`: the process with a tracker wraps what computes advantages and validates."""

    @functools.wraps(start)
    def attached(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        config = kwargs.get("config", args[3] if len(args) > 3 else None)
        ours = _uses_qreward(config)
        tree = OmegaConf.create(config if ours else {})
        self._qreward_log = attach(load_settings(tree), estimator_of(tree)) if ours else None

    return attached


def _with_metrics(log: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tracking.log`: it also gets what was seen of rewards."""

    @functools.wraps(log)
    def logged(self: Any, data: Mapping[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
        rewards = getattr(self, "_qreward_log", None)
        log(self, {**data, **rewards.since_last()} if rewards is not None else data, step, *args, **kwargs)

    return logged


def _checked_trainer(config: Any) -> Trainer | None:
    """The trainer that starts reward workers, with our hooks in place; None if it is unknown. Raises
    `ConfigurationError`: in a reward worker a mistake would show only with the first sample, as its failure.
    """
    name = calling_trainer()
    refuse_impossible(config, name)
    settings = load_settings(config)
    attach(settings, estimator_of(config))
    trainer = None
    if name is not None and is_wrapped(sys.modules.get(_COMPUTES[name][0]), _COMPUTES[name][1]):
        colocated = bool(colocated_sources(settings))
        if colocated and (problem := phases.problem_of(config, name)):
            without_colocated(settings, problem, remedy=phases.REMEDY)
        trainer = Trainer(name, tells_phases=colocated)
    refuse_unserved(settings, config, trainer)
    return trainer


def _uses_qreward(config: Any) -> bool:
    """Whether a trainer's configuration selects our reward manager or a subclass of it."""
    try:
        from verl.trainer.ppo.reward import resolve_reward_manager_cls

        chosen = resolve_reward_manager_cls(OmegaConf.create(config))
    except Exception:  # the tracker of another program, such as supervised training, or an older verl
        return False
    return bool(getattr(chosen, "needs_trainer_hooks", False))
