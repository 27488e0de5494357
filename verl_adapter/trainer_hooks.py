"""Wraps functions of verl in the trainer's process, because verl (0.9) has no hooks for missing rewards.

This happens only in a run whose reward manager is ours, in the processes that start reward workers or a tracker (the
fully asynchronous trainer has one for each):

- A configuration that asks no reward manager, or would end the run later, ends the run before training.
- Reward workers learn their trainer, and that it has these hooks.
- Reward workers are told when the trainer asks for rewards, if a judge sleeps while it trains (`phases`).
- Failed samples are kept out of advantages (`advantages`), of the means of a validation (`validation`), and of the
  filter of groups (`queue`).
- Agent loops tell which tokens the policy wrote, if a judge says what each turn is worth (`response_tokens`).
- Rows of validation are marked, because a reward manager cannot recognise them. So are the copies with which verl
  fills up a batch.
- The tracker gets metrics of what was scored (`metrics`).

If a version of verl lacks what keeps failed samples out, reward workers refuse `on_failure: auto`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf

from qreward_plugins import Config
from qreward_plugins.adapters import colocated_sources, without_colocated

from . import phases, validation
from .advantages import Advantages
from .metrics import RewardLog
from .queue import noting_infos, of_scored_rows, with_extra_info
from .response_tokens import needs_policy_spans, telling_turns
from .settings import estimator_of, load_settings
from .startup import refuse_impossible, refuse_unserved
from .trainers import LEGACY_MODULE, V1_MODULE, Name, Trainer, calling_trainer, with_trainer

_log = logging.getLogger("verl_adapter")

_REPLAY_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
_REWARD_LOOP = "verl.experimental.reward_loop.reward_loop"
_AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"
_SEPARATED = "verl.experimental.separation.ray_trainer"
_WRAPPED = "_qreward"

_COMPUTES: dict[Name, tuple[str, str]] = {
    "v1": (V1_MODULE, "compute_advantage_for_multi_trajectories"),
    "legacy": (LEGACY_MODULE, "compute_advantage"),
    # The experimental trainers have the function under a name of their own module.
    "one_step_off": (_SEPARATED, "compute_advantage"),
    "fully_async": (_SEPARATED, "compute_advantage"),
}
"""The module and the name by which each trainer computes advantages."""

_VALIDATES: tuple[tuple[str, str], ...] = ((LEGACY_MODULE, "RayPPOTrainer"), (V1_MODULE, "PPOTrainer"))

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def install() -> None:
    """Wrap the functions of verl that start reward workers and trackers. A second call changes nothing."""
    _wrap_reward_workers()
    try:
        from verl.utils.tracking import Tracking
    except ImportError:
        return
    if _is_wrapped(Tracking, "log"):
        return
    start, log = Tracking.__init__, Tracking.log

    @functools.wraps(start)
    def start_and_attach(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        config = kwargs.get("config", args[3] if len(args) > 3 else None)
        ours = _uses_qreward(config)
        tree = OmegaConf.create(config if ours else {})
        self._qreward_log = attach(load_settings(tree), estimator_of(tree)) if ours else None

    @functools.wraps(log)
    def log_with_metrics(self: Any, data: Mapping[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
        rewards = getattr(self, "_qreward_log", None)
        log(self, {**data, **rewards.since_last()} if rewards is not None else data, step, *args, **kwargs)

    _replace(Tracking, "__init__", start_and_attach)
    _replace(Tracking, "log", log_with_metrics)


def attach(settings: Config, estimator: str = "") -> RewardLog:
    """Wrap the trainers that are loaded in this process; return what they log of rewards. `estimator`: the name of the
    advantage estimator.
    """
    if not _attached:
        log = RewardLog()
        _attached.append((log, Advantages(settings, log)))
    log, advantages = _attached[0]
    # On each call, because a trainer may have been imported since the last one.
    for module, name in set(_COMPUTES.values()):
        _wrap(sys.modules.get(module), name, advantages.by_keys if module == V1_MODULE else advantages.by_columns)
    for module, name in _VALIDATES:
        # Rows are marked only where the scores of failed samples are left out again.
        if _wrap(sys.modules.get(module), "process_validation_metrics", functools.partial(validation.with_means, log)):
            _wrap_classes(getattr(sys.modules[module], name, None), "_validate", validation.marking)
    classes: tuple[tuple[str, str, str, Wrapper], ...] = (
        (_REPLAY_BUFFER, "ReplayBuffer", "_dapo_filtered_keys", of_scored_rows),
        (_REWARD_LOOP, "RewardLoopManager", "compute_rm_score", noting_infos),
        (V1_MODULE, "PPOTrainer", "_compute_reward_colocate", with_extra_info),
    )
    for module, name, method, wrapper in classes:
        _wrap_classes(getattr(sys.modules.get(module), name, None), method, wrapper)
    if estimator == "remax":
        # Not for the others: some trainers await it, and whether it returns an awaitable depends on its direct caller.
        loops = getattr(sys.modules.get(_AGENT_LOOP), "AgentLoopManager", None)
        _wrap_classes(loops, "generate_sequences", advantages.of_greedy)
    if needs_policy_spans(settings):
        # The legacy trainer imports it later, and uses what is wrapped by then.
        with suppress(ImportError):
            _wrap_classes(import_module(_AGENT_LOOP).AgentLoopManager, "_init_agent_loop_workers", telling_turns)
    for module in (LEGACY_MODULE, _REWARD_LOOP):
        _wrap(sys.modules.get(module), "pad_dataproto_to_divisor", validation.marking_padding)
    return log


_attached: list[tuple[RewardLog, Advantages]] = []
"""What the wrappers of this process share: it has one trainer."""


def _wrap_reward_workers() -> None:
    try:
        from verl.experimental.reward_loop.reward_loop import RewardLoopManager
    except ImportError:
        return
    if _is_wrapped(RewardLoopManager, "__init__") or "_init_reward_loop_workers" not in vars(RewardLoopManager):
        return
    start, start_workers = RewardLoopManager.__init__, RewardLoopManager._init_reward_loop_workers

    @functools.wraps(start)
    def start_checked(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        self._qreward_trainer = _checked_trainer(config) if _uses_qreward(config) else None
        start(self, config, *args, **kwargs)

    @functools.wraps(start_workers)
    def start_informed_workers(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        if getattr(self, "_qreward_trainer", None) is None:
            return start_workers(self, *args, **kwargs)
        if self._qreward_trainer.tells_phases:
            import ray

            worker = sys.modules[_REWARD_LOOP].RewardLoopWorker
            self.reward_loop_workers_class = ray.remote(phases.with_phases(worker))
            phases.follow(self)
        self.config = with_trainer(config, self._qreward_trainer)
        try:
            return start_workers(self, *args, **kwargs)
        finally:
            self.config = config

    _replace(RewardLoopManager, "__init__", start_checked)
    _replace(RewardLoopManager, "_init_reward_loop_workers", start_informed_workers)


def _checked_trainer(config: Any) -> Trainer | None:
    """The trainer that starts reward workers, with our hooks in place; None if it is unknown. Raises
    `ConfigurationError`: in a reward worker a mistake would show only with the first sample, as its failure.
    """
    name = calling_trainer()
    refuse_impossible(config, name)
    settings = load_settings(config)
    attach(settings, estimator_of(config))
    trainer = None
    if name is not None and _is_wrapped(sys.modules.get(_COMPUTES[name][0]), _COMPUTES[name][1]):
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


def _with_subclasses(cls: type[Any] | None) -> Iterator[type[Any]]:
    if cls is None:
        return
    yield cls
    for derived in type.__subclasses__(cls):
        yield from _with_subclasses(derived)


def _wrap_classes(cls: type[Any] | None, name: str, wrapper: Wrapper) -> None:
    """Wrap a method of a class and of the classes made of it, where they define it."""
    for each in _with_subclasses(cls):
        _wrap(each, name, wrapper)


def _wrap(owner: Any, name: str, wrapper: Wrapper) -> bool:
    """Wrap a function that `owner` itself defines; return whether it is wrapped."""
    if owner is None:
        return False
    original = vars(owner).get(name)
    if original is not None and not _is_wrapped(owner, name):
        _replace(owner, name, wrapper(original))
    return original is not None


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(function, _WRAPPED, True)
    setattr(owner, name, function)


def _is_wrapped(owner: Any, name: str) -> bool:
    return owner is not None and bool(getattr(vars(owner).get(name), _WRAPPED, False))
