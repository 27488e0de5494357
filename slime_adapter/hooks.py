"""slime's hooks beside the reward function: filters of groups, logs, and the evaluation of runs with `--group-rm`.

slime resamples until its batch is full, without limit (slime/rollout/sglang_rollout.py). While a judge is down, a
filter that drops failed groups would do so for ever. So the core's `GroupGate` ends such a run, with an error that says
what the judge answered.

A log hook that returns False leaves logging to slime, which also logs the hook's entries in its dict of extra metrics.
In evaluation and in fully-async rollouts there is no such dict. Then the hook logs by itself, on the axes of slime's
trackers (`rollout/`, `eval/`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from qreward_plugins.adapters import summary

from .samples import ROLLOUT_SAMPLE, flat, group_of, has_reward, record_of
from .scoring import give_stand_ins, settle
from .settings import adapter_of, end_rewards

REASON = "qreward_failed"
"""The name under which slime counts the dropped groups: `rollout/dynamic_filter/drop_qreward_failed`."""


def drop_failed_groups(args: Any, samples: Sequence[ROLLOUT_SAMPLE], **_: Any) -> Any:
    """slime's `--dynamic-sampling-filter-path`: keep a group if at least `groups.min_scored` of its samples have a
    reward.

    Returns slime's `DynamicFilterOutput`. Raises `JudgeUnavailable` after `groups.give_up_after` dropped groups in
    a row.
    """
    group = list(flat(samples))
    settle(args, group)
    causes = [str(record_of(sample).get("cause") or "no reward") for sample in group if not has_reward(args, sample)]
    adapter = adapter_of(args)
    kept = adapter.gate.admit(len(group), causes, detail=adapter.last_failure if causes else "")
    output = import_module("slime.rollout.filter_hub.base_types").DynamicFilterOutput
    return output(keep=kept, reason=None if kept else REASON)


def drop_failed_and_flat_groups(args: Any, samples: Sequence[ROLLOUT_SAMPLE], **kwargs: Any) -> Any:
    """`drop_failed_groups`, then slime's own filter, which drops groups whose scored samples have equal rewards (as in
    DAPO; slime/rollout/filter_hub/dynamic_sampling_filters.py). slime accepts the path of one filter only.
    """
    output = drop_failed_groups(args, samples, **kwargs)
    if not output.keep:
        return output
    flatness = import_module("slime.rollout.filter_hub.dynamic_sampling_filters")
    scored = [sample for sample in flat(samples) if has_reward(args, sample)]
    return flatness.check_reward_nonzero_std(args, scored, **kwargs)


def log_rollout(
    rollout_id: int,
    args: Any,
    samples: Sequence[ROLLOUT_SAMPLE],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> bool:
    """slime's `--custom-rollout-log-function-path`: adds `rollout/qreward/...` to the step's metrics; returns False.

    It is the first hook that sees the whole batch, before slime's own metrics read the rewards. So samples without a
    reward get a stand-in here. Judges on the trainer's GPUs sleep when it returns.
    """
    unscored = [sample for sample in samples if getattr(sample, "reward", None) is None]
    if unscored and any(record_of(sample) for sample in samples):
        give_stand_ins(args, unscored)
    settle(args, samples)  # so that no verdict arrives between these metrics and the training
    numbers = _summary(samples)
    report = adapter_of(args).portal.last_batch()
    if numbers and report is not None:
        numbers.update(report.metrics())
    metrics = {f"rollout/qreward/{name}": value for name, value in numbers.items()}
    _log(args, rollout_id, metrics, rollout_extra_metrics, "rollout/step")
    args.logged_rollout_id = rollout_id  # slime's contract tests look for it
    end_rewards()
    return False


def log_eval(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: dict[str, Any] | None) -> bool:
    """slime's `--custom-eval-rollout-log-function-path`: removes failed samples from `data`, of which slime takes
    means, and adds `eval/<data set>/qreward/...`; returns False.

    `--log-passrate` needs whole groups, so with it all samples of a prompt with a failed one are removed. A data set
    without any reward is removed from `data`, because slime cannot average nothing; its failure rate is logged.
    """
    metrics: dict[str, Any] = {}
    for name in list(data):
        samples = data[name].get("samples")
        if not samples:
            continue
        metrics.update({f"eval/{name}/qreward/{key}": value for key, value in _summary(samples).items()})
        kept = _kept(args, samples)
        if not any(kept):
            del data[name]
        elif not all(kept):
            data[name] = {key: _only(value, kept) for key, value in data[name].items()}
    _log(args, rollout_id, metrics, extra_metrics, "eval/step")
    args.logged_eval_rollout_id = rollout_id  # slime's contract tests look for it
    return False


def eval_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = True) -> Any:
    """slime's `--eval-function-path` for runs with `--group-rm`, which slime's own evaluation refuses, because it
    has no groups. It is that evaluation, sample by sample. Returns slime's `RolloutFnEvalOutput`.
    """
    single = copy.copy(args)
    single.group_rm = False
    rollout = import_module("slime.rollout.sglang_rollout")
    return rollout.generate_rollout(single, rollout_id, data_source, evaluation=evaluation)


def _summary(samples: Iterable[ROLLOUT_SAMPLE]) -> dict[str, float]:
    judged = [sample for sample in samples if record_of(sample)]
    # In an evaluation slime numbers no groups.
    groups = None if any(group_of(sample) is None for sample in judged) else map(group_of, judged)
    return summary(map(record_of, judged), groups)


def _kept(args: Any, samples: Sequence[ROLLOUT_SAMPLE]) -> list[bool]:
    """Whether each sample of a data set counts; slime sorts them by prompt."""
    scored = [not record_of(sample) or has_reward(args, sample) for sample in samples]
    size = getattr(args, "n_samples_per_eval_prompt", 1) if getattr(args, "log_passrate", False) else 1
    if size > 1 and len(samples) % size == 0:
        return [all(scored[place - place % size : place - place % size + size]) for place in range(len(samples))]
    return scored


def _only(values: Any, kept: Sequence[bool]) -> Any:
    if not isinstance(values, list) or len(values) != len(kept):
        return values
    return [value for value, keep in zip(values, kept, strict=True) if keep]


def _log(
    args: Any, rollout_id: int, metrics: dict[str, Any], extra_metrics: dict[str, Any] | None, step_key: str
) -> None:
    """Put metrics into slime's dict, or log them if there is none."""
    if extra_metrics is not None:
        extra_metrics.update(metrics)
    elif metrics:
        step = _module("metric_utils").compute_rollout_step(args, rollout_id)
        _module("logging_utils").log(args, {**metrics, step_key: step}, step_key=step_key)


def _module(name: str) -> Any:
    """A module of slime, which moved from `utils` (v0.3.1) to `observability`."""
    try:
        return import_module(f"slime.observability.{name}")
    except ModuleNotFoundError:
        return import_module(f"slime.utils.{name}")
