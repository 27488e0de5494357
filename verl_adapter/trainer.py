"""What verl's trainers do not do by themselves with rewards that are missing, in the process of the trainer.

verl has no hook for any of it (0.9.1), so things of its own are wrapped, only in a run whose reward manager is ours, in
the processes that start reward workers or a tracker (the fully asynchronous trainer has one for each):

- reward workers are told which trainer they work for, because their configuration does not always say it;
- a configuration that would end the run later, or in which no reward manager would be asked, ends it there;
- the metrics of a step get the counts of the group barrier (`qreward/failed_rate`, ...): verl drops
  `reward_extra_info` after training and has no metric of it;
- rows of validation are marked, because a reward manager cannot tell them from others, and so are the copies of rows
  with which verl fills up a batch: they are neither judged nor counted;
- failed samples are left out of the means of validation: verl skips None there, but a reward can never be None;
- a group in which every sample failed is not taken for one of equal rewards: verl's filter of groups would replace it,
  and with a judge that is down it would replace groups for ever;
- the advantage of a sample that trains on the mean of its group is set to exactly zero: it is that already, but for
  what adding up float32 numbers leaves, some 1e-7, and more where all rewards of a group are equal.

Where a version of verl has not what a wrap needs, that wrap does nothing, and says so once.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from qreward_plugins.groups import barrier_actor

from .policy import failure_policy
from .rewards import IMPUTED, MISSING, RETURNED, without_text
from .rollouts import PADDING, VALIDATION
from .settings import load_settings
from .startup import refuse_impossible
from .trainers import LEGACY_MODULE, V1_MODULE, Trainer, calling_trainer, telling, trainer_of

_log = logging.getLogger("verl_adapter")

_LEGACY, _V1 = LEGACY_MODULE, V1_MODULE
_REPLAY_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
_REWARD_LOOP = "verl.experimental.reward_loop.reward_loop"
_SEPARATED = "verl.experimental.separation.ray_trainer"
_ANSWER_S = 10.0
_OURS = "_qreward"
_NOT_EXACTLY_ZERO = "the advantage of a sample that trains on the mean of its group is zero but for what float32 leaves"


def install() -> None:
    """Wait in this process for a trainer to start its reward workers and its tracker. Installing twice changes
    nothing.
    """
    _tell_reward_workers()
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
        self._qreward_numbers = OutcomeNumbers.attach() if _rewards_are_ours(config) else None

    @functools.wraps(log)
    def log_with_numbers(self: Any, data: Mapping[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
        numbers = getattr(self, "_qreward_numbers", None)
        log(self, {**data, **numbers.since_last()} if numbers is not None else data, step, *args, **kwargs)

    _replace(Tracking, "__init__", start_and_attach)
    _replace(Tracking, "log", log_with_numbers)


def _tell_reward_workers() -> None:
    try:
        from verl.experimental.reward_loop.reward_loop import RewardLoopManager
    except ImportError:
        return
    if _is_wrapped(RewardLoopManager, "__init__") or "_init_reward_loop_workers" not in vars(RewardLoopManager):
        return
    start, start_workers = RewardLoopManager.__init__, RewardLoopManager._init_reward_loop_workers

    @functools.wraps(start)
    def start_and_look(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        self._qreward_trainer = None
        if _rewards_are_ours(config):
            name = calling_trainer() or trainer_of(config).name
            refuse_impossible(config, Trainer(name))
            self._qreward_trainer = Trainer(
                name, marks_validation=OutcomeNumbers.attach() is not None and _marks_rows()
            )
            # In a reward worker a mistake would show with the first sample, and as that sample's.
            failure_policy(load_settings(config), telling(config, self._qreward_trainer))
        start(self, config, *args, **kwargs)

    @functools.wraps(start_workers)
    def start_told_workers(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        if getattr(self, "_qreward_trainer", None) is None:
            return start_workers(self, *args, **kwargs)
        self.config = telling(config, self._qreward_trainer)
        try:
            return start_workers(self, *args, **kwargs)
        finally:
            self.config = config

    _replace(RewardLoopManager, "__init__", start_and_look)
    _replace(RewardLoopManager, "_init_reward_loop_workers", start_told_workers)


class OutcomeNumbers:
    """The counts of the group barrier's actor as metrics, for a tracker."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._told: tuple[str, dict[str, int]] = ("", {})

    @classmethod
    def attach(cls) -> OutcomeNumbers | None:
        """Wrap the trainer that is loaded in this process, and find the actor. None if there is none."""
        if _attached:
            numbers = _attached[0]
        else:
            try:
                numbers = cls(barrier_actor())
            except Exception as error:
                _log.warning("no metrics of rewards: there is no group barrier (%s: %s)", type(error).__name__, error)
                return None
            _attached.append(numbers)
        # On each call, because a trainer may have been imported since the last one.
        _wrap_trainers(numbers)
        return numbers

    def since_last(self) -> dict[str, float]:
        """Metrics of what was scored since the last call; empty where nothing was, or the actor does not answer."""
        answer = self._read()
        if answer is None:
            return {}
        before = self._told[1] if self._told[0] == answer[0] else {}
        self._told = answer
        news = {key: count - before.get(key, 0) for key, count in answer[1].items()}
        metrics: dict[str, float] = {}
        for split, prefix in (("train", "qreward/"), ("val", "qreward/val/")):
            samples = news.get(f"{split}/samples", 0)
            if not samples:
                continue
            metrics[f"{prefix}samples"] = float(samples)
            metrics[f"{prefix}failed_rate"] = news.get(f"{split}/failed", 0) / samples
            for cause in ("infra", "verdict", "policy"):
                metrics[f"{prefix}failed/{cause}"] = float(news.get(f"{split}/failed/{cause}", 0))
            metrics[f"{prefix}cut_rate"] = news.get(f"{split}/cut", 0) / samples
            metrics[f"{prefix}floor_rate"] = news.get(f"{split}/floor", 0) / samples
            if split == "train":
                metrics[f"{prefix}imputed_rate"] = news.get(f"{split}/imputed", 0) / samples
        return metrics

    def none_imputed(self) -> bool:
        """Whether it is sure that no sample of this run trains on the mean of its group so far."""
        answer = self._read()
        return answer is not None and self._told[0] in ("", answer[0]) and not answer[1].get("train/imputed")

    def _read(self) -> tuple[str, dict[str, int]] | None:
        import ray

        try:
            start, counts = ray.get(self._actor.counts.remote(), timeout=_ANSWER_S)
        except Exception as error:
            _warn_once(f"no metrics of rewards: the group barrier does not answer ({type(error).__name__})")
            with suppress(Exception):
                self._actor = barrier_actor()
            return None
        return start, counts


_attached: list[OutcomeNumbers] = []
"""The one `OutcomeNumbers` of this process: it remembers which counts were already reported."""


def _rewards_are_ours(config: Any) -> bool:
    """Whether the reward manager of a trainer's configuration is ours, or made of ours."""
    from omegaconf import OmegaConf

    from .manager import QRewardManager

    try:
        from verl.trainer.ppo.reward import resolve_reward_manager_cls

        chosen = resolve_reward_manager_cls(OmegaConf.create(config))
    except Exception:  # a tracker of something else: supervised training, an older verl
        return False
    return isinstance(chosen, type) and issubclass(chosen, QRewardManager)


def _wrap_trainers(numbers: OutcomeNumbers) -> None:
    found = False
    for module, name in ((_LEGACY, "RayPPOTrainer"), (_V1, "PPOTrainer")):
        trainer = getattr(sys.modules.get(module), name, None)
        if trainer is None:
            continue
        found = True
        for cls in _with_subclasses(trainer):
            # Marked rows are only safe to hand out where their scores are left out again.
            if _wrap(cls, "_val_metrics_update", _leaving_out_the_missing, inherited=cls is not trainer):
                _wrap(cls, "_validate", _marking_rows, inherited=cls is not trainer)
    for cls in _with_subclasses(getattr(sys.modules.get(_REPLAY_BUFFER), "ReplayBuffer", None)):
        _wrap(cls, "_dapo_filtered_keys", _keeping_the_failed, inherited=cls.__name__ != "ReplayBuffer")
    for module in (_LEGACY, _REWARD_LOOP):
        _wrap(sys.modules.get(module), "pad_dataproto_to_divisor", _marking_padding, inherited=True)
    # The experimental trainers have the function under a name of their own module.
    for module in (_LEGACY, _SEPARATED):
        _wrap(sys.modules.get(module), "compute_advantage", _neutral_by_columns, inherited=True)
    _wrap(
        sys.modules.get(_V1),
        "compute_advantage_for_multi_trajectories",
        functools.partial(_neutral_by_keys, numbers),
        inherited=True,
    )
    if not found:
        _log.warning("qreward does not know this trainer of verl: failed samples count in its means of validation")


def _marks_rows() -> bool:
    """Whether all trainers that are loaded in this process mark their rows of validation."""
    trainers = [
        getattr(sys.modules.get(module), name, None)
        for module, name in ((_LEGACY, "RayPPOTrainer"), (_V1, "PPOTrainer"))
    ]
    known = [trainer for trainer in trainers if trainer is not None]
    return bool(known) and all(_is_wrapped(trainer, "_validate") for trainer in known)


def _marking_rows(validate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(validate)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        loader = self.val_dataloader
        if not isinstance(loader.collate_fn, MarkedRows):
            loader.collate_fn = MarkedRows(loader.collate_fn)
        return validate(self, *args, **kwargs)

    return marked


class MarkedRows:
    """Collates rows as verl does, and marks each as one of validation."""

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


def _marking_padding(pad: Callable[..., Any]) -> Callable[..., Any]:
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


def _leaving_out_the_missing(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def left_out(self: Any, sources: Any, uids: Any, infos: dict[str, list[Any]], *args: Any, **kwargs: Any) -> Any:
        missing = {row for row, value in enumerate(infos.get(MISSING) or ()) if value}
        infos = _unpacked(infos)
        if missing:
            infos = {
                name: _without(missing, values) if _is_of_judge(name) else values for name, values in infos.items()
            }
        expected = kwargs.get("expected_acc_counts")
        if MISSING in infos and expected:
            # verl counts every session without `acc` as a wrong answer, but the correctness of these is unknown.
            expected = dict(expected)
            for row, value in enumerate(infos.get("acc") or [None] * len(infos[MISSING])):
                prompt = (str(sources[row]), str(uids[row]))
                if value is None and prompt in expected:
                    expected[prompt] -= 1
            kwargs["expected_acc_counts"] = expected
        return update(self, sources, uids, infos, *args, **kwargs)

    return left_out


def _unpacked(infos: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns of a validation, with those from the JSON text of `RETURNED` in its place."""
    columns = {name: values for name, values in infos.items() if name != RETURNED}
    rows = without_text(infos.get(RETURNED) or ())
    for name in dict.fromkeys(name for row in rows for name in row):
        columns.setdefault(name, [row.get(name) for row in rows])
    return columns


def _is_of_judge(name: str) -> bool:
    """Whether a value says something of a response, and not of how its scoring went."""
    return not name.startswith("qreward/") or name.startswith("qreward/score/")


def _without(missing: set[int], values: list[Any]) -> list[Any]:
    return [None if row in missing else value for row, value in enumerate(values)]


def _keeping_the_failed(classify: Callable[..., Any]) -> Callable[..., Any]:
    """Take groups without any reward out of those that verl replaces, because all their samples have one metric."""
    known: dict[str, bool] = {}

    @functools.wraps(classify)
    def kept(self: Any, partition_id: str) -> Any:
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

    return kept


def _neutral_by_columns(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def neutral(data: Any, *args: Any, **kwargs: Any) -> Any:
        data = compute(data, *args, **kwargs)
        _set_to_zero(data, data.non_tensor_batch.get(IMPUTED))
        return data

    return neutral


def _neutral_by_keys(numbers: OutcomeNumbers, compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def neutral(data: Any, batch_keys: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        data = compute(data, batch_keys, *args, **kwargs)
        if not numbers.none_imputed():
            _set_to_zero(data, _in_queue(batch_keys, IMPUTED, "train", _NOT_EXACTLY_ZERO))
        return data

    return neutral


def _in_queue(keys: Sequence[str], name: str, partition_id: str, otherwise: str) -> list[Any]:
    """A value of the extra info of each row, which V1 keeps in its queue of transfers; empty if it cannot be read.

    `otherwise`: what that leads to, for the warning.
    """
    try:
        queue = importlib.import_module("transfer_queue")
        fields = queue.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=["extra_fields"])
        column = fields["extra_fields"]
        rows = column.tolist() if hasattr(column, "tolist") else list(column)
        return [(getattr(row, "data", row) or {}).get("reward_extra_info", {}).get(name) for row in rows]
    except Exception as error:
        _warn_once(f"the extra info of samples cannot be read ({type(error).__name__}: {error}); {otherwise}")
        return []


def _set_to_zero(data: Any, imputed: Any) -> None:
    rows = [row for row, value in enumerate(imputed if imputed is not None else ()) if value]
    for name in ("advantages", "returns"):
        if rows and name in data.batch.keys():  # noqa: SIM118 (a TensorDict refuses `in`)
            data.batch[name][rows] = 0.0


@functools.lru_cache(maxsize=32)
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def _with_subclasses(cls: type[Any] | None) -> Iterator[type[Any]]:
    if cls is None:
        return
    yield cls
    for derived in type.__subclasses__(cls):
        yield from _with_subclasses(derived)


def _wrap(
    owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]], *, inherited: bool
) -> bool:
    """Wrap what `owner` defines itself; whether it is wrapped now. `inherited`: it may be that it defines no such."""
    if owner is None:
        return False
    if _is_wrapped(owner, name):
        return True
    original = vars(owner).get(name)
    if original is None:
        if not inherited:
            _log.warning("%s of this verl has no %s; see verl_adapter.trainer for what is missing then", owner, name)
        return inherited
    _replace(owner, name, wrapper(original))
    return True


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(function, _OURS, True)
    setattr(owner, name, function)


def _is_wrapped(owner: Any, name: str) -> bool:
    return bool(getattr(vars(owner).get(name), _OURS, False))
