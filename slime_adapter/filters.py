"""Dynamic sampling filters, which replace groups with too few rewards by other prompts.

slime resamples until its batch is full, without limit (slime/rollout/sglang_rollout.py). While a judge is down, a
filter that drops failed groups would do so for ever. So the core's `GroupGate` ends such a run, with an error that says
what the judge answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .late import settle
from .samples import ROLLOUT_SAMPLE, flat, has_reward, record_of
from .settings import adapter_of

REASON = "qreward_failed"
"""The name under which slime counts the dropped groups: `rollout/dynamic_filter/drop_qreward_failed`."""


@dataclass
class FilterOutput:
    """Stands for slime's `DynamicFilterOutput` if slime is not installed."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def drop_failed_groups(args: Any, samples: Sequence[ROLLOUT_SAMPLE], **_: Any) -> Any:
    """slime's `--dynamic-sampling-filter-path`: keep a group if at least `groups.min_scored` of its samples have a
    reward.

    Returns slime's `DynamicFilterOutput`. Raises `JudgeUnavailable` after `groups.give_up_after` dropped groups in
    a row.
    """
    group = list(flat(samples))
    settle(group)
    causes = [str(record_of(sample).get("cause") or "no reward") for sample in group if not has_reward(args, sample)]
    adapter = adapter_of(args)
    kept = adapter.gate.admit(len(group), causes, detail=adapter.last_failure if causes else "")
    return _output()(keep=kept, reason=None if kept else REASON)


def drop_failed_and_flat_groups(args: Any, samples: Sequence[ROLLOUT_SAMPLE], **kwargs: Any) -> Any:
    """`drop_failed_groups`, then slime's own filter, which drops groups whose rewards are all equal (as in DAPO;
    slime/rollout/filter_hub/dynamic_sampling_filters.py). slime accepts the path of one filter only.
    """
    output = drop_failed_groups(args, samples, **kwargs)
    if not output.keep:
        return output
    flatness = import_module("slime.rollout.filter_hub.dynamic_sampling_filters")
    return flatness.check_reward_nonzero_std(args, list(flat(samples)), **kwargs)


def _output() -> type[Any]:
    try:
        module = import_module("slime.rollout.filter_hub.base_types")
    except ModuleNotFoundError:
        return FilterOutput
    return module.DynamicFilterOutput  # type: ignore[no-any-return]
