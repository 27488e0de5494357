"""Wraps functions of verl in the trainer's process, because verl (0.9.1) has no hooks for missing rewards.

This happens only in a run whose reward manager is ours, in the processes that start reward workers or a tracker (the
fully asynchronous trainer has one for each):

- Reward workers learn their trainer, because their configuration does not always say it.
- Reward workers are told when the trainer asks for rewards, if a judge sleeps while it trains (`phases`).
- A configuration that asks no reward manager, or would end the run later, ends the run before training.
- The metrics of a step get the counts of the group barrier (`qreward/failed_rate`, ...). verl drops
  `reward_extra_info` after training and has no metric of it.
- Rows of validation are marked, because a reward manager cannot recognise them. So are the copies with which verl
  fills up a batch; they are neither judged nor counted.
- Failed samples, and values that a sample does not have, are left out of the means of validation.
- verl's filter of groups keeps a group in which every sample failed. It would take it for a group of equal rewards
  and replace it, and with a judge that is down it would replace groups for ever.
- The advantage of a sample that trains on the mean of its group is set to exactly zero. Rounding in float32 leaves
  some 1e-7, and more where all rewards of a group are equal.

If a version of verl lacks what a wrapper needs, that wrapper does nothing, and one warning says so.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qreward_plugins.adapters import barrier_actor, colocated_sources, without_colocated

from . import phases
from .metrics import OutcomeMetrics, warn_once
from .policy import failure_policy
from .rewards import IMPUTED, MISSING, RETURNED, is_absent, read_returned
from .rollouts import PADDING, VALIDATION
from .settings import load_settings
from .startup import refuse_impossible
from .trainers import LEGACY_MODULE, V1_MODULE, Trainer, calling_trainer, trainer_of, with_trainer

_log = logging.getLogger("verl_adapter")

_REPLAY_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
_REWARD_LOOP = "verl.experimental.reward_loop.reward_loop"
_SEPARATED = "verl.experimental.separation.ray_trainer"
_WRAPPED = "_qreward"
_NOT_EXACTLY_ZERO = "advantages of samples that train on the mean of their group are zero only up to float32 rounding"


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
        self._qreward_metrics = attach() if _uses_qreward(config) else None

    @functools.wraps(log)
    def log_with_metrics(self: Any, data: Mapping[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
        metrics = getattr(self, "_qreward_metrics", None)
        log(self, {**data, **metrics.since_last()} if metrics is not None else data, step, *args, **kwargs)

    _replace(Tracking, "__init__", start_and_attach)
    _replace(Tracking, "log", log_with_metrics)


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
        self._qreward_trainer = None
        if _uses_qreward(config):
            name = calling_trainer() or trainer_of(config).name
            refuse_impossible(config, Trainer(name))
            # In a reward worker a mistake would show only with the first sample, as its failure.
            settings = load_settings(config)
            colocated = bool(colocated_sources(settings))
            if colocated and (problem := phases.problem_of(config, name)):
                without_colocated(settings, problem, remedy=phases.REMEDY)
            marks = attach() is not None and _marks_rows()
            self._qreward_trainer = Trainer(name, marks_validation=marks, tells_phases=colocated)
            failure_policy(settings, with_trainer(config, self._qreward_trainer))
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


def attach() -> OutcomeMetrics | None:
    """Wrap the trainer that is loaded in this process; return the metrics for its tracker, None without a barrier."""
    if not _attached:
        try:
            _attached.append(OutcomeMetrics(barrier_actor()))
        except Exception as error:
            _log.warning("no metrics of rewards: there is no group barrier (%s: %s)", type(error).__name__, error)
            return None
    # On each call, because a trainer may have been imported since the last one.
    _wrap_trainers(_attached[0])
    return _attached[0]


_attached: list[OutcomeMetrics] = []
"""The one `OutcomeMetrics` of this process, which remembers what it has reported."""


def _uses_qreward(config: Any) -> bool:
    """Whether a trainer's configuration selects our reward manager or a subclass of it."""
    from omegaconf import OmegaConf

    from .manager import QRewardManager

    try:
        from verl.trainer.ppo.reward import resolve_reward_manager_cls

        chosen = resolve_reward_manager_cls(OmegaConf.create(config))
    except Exception:  # the tracker of another program, such as supervised training, or an older verl
        return False
    return isinstance(chosen, type) and issubclass(chosen, QRewardManager)


def _wrap_trainers(metrics: OutcomeMetrics) -> None:
    found = False
    for module, name in ((LEGACY_MODULE, "RayPPOTrainer"), (V1_MODULE, "PPOTrainer")):
        trainer = getattr(sys.modules.get(module), name, None)
        if trainer is None:
            continue
        found = True
        # Rows are marked only where the scores of failed samples are left out again.
        if _wrap(sys.modules[module], "process_validation_metrics", _of_present_rows, inherited=False):
            for cls in _with_subclasses(trainer):
                _wrap(cls, "_validate", _mark_validation, inherited=cls is not trainer)
    for cls in _with_subclasses(getattr(sys.modules.get(_REPLAY_BUFFER), "ReplayBuffer", None)):
        _wrap(cls, "_dapo_filtered_keys", _keep_failed_groups, inherited=cls.__name__ != "ReplayBuffer")
    for module in (LEGACY_MODULE, _REWARD_LOOP):
        _wrap(sys.modules.get(module), "pad_dataproto_to_divisor", _mark_padding, inherited=True)
    # The experimental trainers have the function under a name of their own module.
    for module in (LEGACY_MODULE, _SEPARATED):
        _wrap(sys.modules.get(module), "compute_advantage", _neutral_by_columns, inherited=True)
    _wrap(
        sys.modules.get(V1_MODULE),
        "compute_advantage_for_multi_trajectories",
        functools.partial(_neutral_by_keys, metrics),
        inherited=True,
    )
    if not found:
        _log.warning("qreward does not know this trainer of verl: its means of validation count failed samples")


def _marks_rows() -> bool:
    """Whether all trainers that are loaded in this process mark their validation rows."""
    trainers = [
        getattr(sys.modules.get(module), name, None)
        for module, name in ((LEGACY_MODULE, "RayPPOTrainer"), (V1_MODULE, "PPOTrainer"))
    ]
    known = [trainer for trainer in trainers if trainer is not None]
    return bool(known) and all(_is_wrapped(trainer, "_validate") for trainer in known)


def _mark_validation(validate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(validate)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        loader = self.val_dataloader
        if not isinstance(loader.collate_fn, MarkedRows):
            loader.collate_fn = MarkedRows(loader.collate_fn)
        return validate(self, *args, **kwargs)

    return marked


class MarkedRows:
    """Collates rows as verl does, and marks each as a validation row."""

    def __init__(self, collate: Callable[[Any], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, rows: Any) -> dict[str, Any]:
        columns = self._collate(rows)
        infos = columns.get("extra_info")
        marked = np.empty(len(rows), dtype=object)
        marked[:] = [
            {**(info or {}), VALIDATION: True} for info in (infos if infos is not None else [None] * len(rows))
        ]
        return {**columns, "extra_info": marked}


def _mark_padding(pad: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(pad)
    def marked(data: Any, *args: Any, **kwargs: Any) -> Any:
        padded, count = pad(data, *args, **kwargs)
        if count:
            infos = padded.non_tensor_batch.get("extra_info")
            column = np.empty(len(padded), dtype=object)
            column[:] = list(infos) if infos is not None else [None] * len(padded)
            column[-count:] = [{**(info or {}), PADDING: True} for info in column[-count:]]
            padded.non_tensor_batch["extra_info"] = column
        return padded, count

    return marked


def _of_present_rows(process: Callable[..., Any]) -> Callable[..., Any]:
    """Compute the metrics of each column from the rows that have a value there. Only verl 0.9.1 skips None itself."""

    @functools.wraps(process)
    def left_out(sources: Any, uids: Any, infos: dict[str, list[Any]], *args: Any, **kwargs: Any) -> Any:
        missing = {row for row, value in enumerate(infos.get(MISSING) or ()) if value}
        expected = dict(kwargs.get("expected_acc_counts") or {})
        parts: dict[tuple[int, ...], dict[str, list[Any]]] = {}
        for name, values in _unpacked(infos).items():
            out = {row for row, value in enumerate(values) if is_absent(value)}
            out |= missing if _is_about_response(name) else set()
            rows = tuple(row for row in range(len(values)) if row not in out)
            parts.setdefault(rows, {})[name] = [values[row] for row in rows]
            # verl counts every session without `acc` as wrong, but the correctness of a failed sample is unknown.
            for prompt in [(str(sources[row]), str(uids[row])) for row in out if name == "acc"]:
                if prompt in expected:
                    expected[prompt] -= 1
        if expected:
            kwargs["expected_acc_counts"] = expected
        found: dict[Any, dict[str, Any]] = {}
        for rows, columns in parts.items():
            told = process([sources[row] for row in rows], [uids[row] for row in rows], columns, *args, **kwargs)
            for source, metrics in told.items():
                found.setdefault(source, {}).update(metrics)
        return found

    return left_out


def _unpacked(infos: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns of a validation, with the JSON texts of `RETURNED` unpacked into columns."""
    columns = {name: values for name, values in infos.items() if name != RETURNED}
    rows = read_returned(infos.get(RETURNED) or ())
    for name in dict.fromkeys(name for row in rows for name in row):
        columns.setdefault(name, [row.get(name) for row in rows])
    return columns


def _is_about_response(name: str) -> bool:
    """Whether a column describes the response, and not how its scoring went."""
    return not name.startswith("qreward/") or name.startswith("qreward/score/")


def _keep_failed_groups(classify: Callable[..., Any]) -> Callable[..., Any]:
    """Keep groups without any reward, which verl would replace because all their samples have the same metric."""
    known: dict[str, bool] = {}

    @functools.wraps(classify)
    def filtered_keys(self: Any, partition_id: str) -> Any:
        filtered, counts = classify(self, partition_id)
        for uid in [uid for uid in known if uid not in filtered]:
            del known[uid]
        for uid in filtered:
            if uid not in known:
                keys = [key for key in self.partitions[partition_id] if key.split("_")[0] == uid]
                column = _in_queue(keys, MISSING, partition_id, "groups without a reward are replaced")
                known[uid] = bool(column) and all(column)
        failed = {uid for uid in filtered if known[uid]}
        if not failed:
            return filtered, counts
        left = filtered - failed
        values = self._dapo_classification_cache[partition_id]
        return left, type(counts)(values[uid] for uid in left)

    return filtered_keys


def _neutral_by_columns(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def neutral(data: Any, *args: Any, **kwargs: Any) -> Any:
        data = compute(data, *args, **kwargs)
        _set_to_zero(data, data.non_tensor_batch.get(IMPUTED))
        return data

    return neutral


def _neutral_by_keys(metrics: OutcomeMetrics, compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def neutral(data: Any, batch_keys: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        data = compute(data, batch_keys, *args, **kwargs)
        if metrics.may_have_imputed():
            _set_to_zero(data, _in_queue(batch_keys, IMPUTED, "train", _NOT_EXACTLY_ZERO))
        return data

    return neutral


def _in_queue(keys: Sequence[str], name: str, partition_id: str, consequence: str) -> list[Any]:
    """One value of each row's extra info, from V1's transfer queue; empty if it cannot be read.

    `consequence` of not reading it, for the warning.
    """
    try:
        queue = importlib.import_module("transfer_queue")
        fields = queue.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=["extra_fields"])
        column = fields["extra_fields"]
        rows = column.tolist() if hasattr(column, "tolist") else list(column)
        return [(getattr(row, "data", row) or {}).get("reward_extra_info", {}).get(name) for row in rows]
    except Exception as error:
        warn_once(f"the extra info of samples cannot be read ({type(error).__name__}: {error}); {consequence}")
        return []


def _set_to_zero(data: Any, imputed: Any) -> None:
    rows = [row for row, value in enumerate(imputed if imputed is not None else ()) if value]
    for name in ("advantages", "returns"):
        if rows and name in data.batch.keys():  # noqa: SIM118 (a TensorDict refuses `in`)
            data.batch[name][rows] = 0.0


def _with_subclasses(cls: type[Any] | None) -> Iterator[type[Any]]:
    if cls is None:
        return
    yield cls
    for derived in type.__subclasses__(cls):
        yield from _with_subclasses(derived)


def _wrap(
    owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]], *, inherited: bool
) -> bool:
    """Wrap a function that `owner` itself defines; return whether it is wrapped. `inherited`: it may define none."""
    if owner is None:
        return False
    if _is_wrapped(owner, name):
        return True
    original = vars(owner).get(name)
    if original is None:
        if not inherited:
            _log.warning(
                "%s of this verl has no %s; see verl_adapter.trainer_hooks for what is missing then", owner, name
            )
        return inherited
    _replace(owner, name, wrapper(original))
    return True


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(function, _WRAPPED, True)
    setattr(owner, name, function)


def _is_wrapped(owner: Any, name: str) -> bool:
    return bool(getattr(vars(owner).get(name), _WRAPPED, False))
