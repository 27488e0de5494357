"""Turns slime's samples into the core's, and keeps our facts on slime's samples.

These functions read the attributes of slime's `Sample` (slime/utils/types.py) and never import it. So they also accept
the samples of a fake trainer, and the bare objects of slime's contract tests.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from qreward_plugins import Sample
from qreward_plugins.adapters import (
    attach,
    fits_float32,
    mapping_or_unreadable,
    messages_of,
    name_or_unreadable,
    pictured,
)

RECORD = "qreward"
"""The key of `sample.metadata` that holds the record of a sample."""

ROLLOUT_SAMPLE = Any
"""slime's `Sample`, or an object with the same attributes."""


def to_sample(sample: ROLLOUT_SAMPLE) -> Sample:
    """Turn one rollout into a core sample. `metadata` becomes its extras. The data source is `metadata["data_source"]`,
    else slime's own name of it (slime/utils/data.py: `source`, `metadata["source_name"]`), else `rm_type`.

    Images are those of `multimodal_inputs["images"]` (slime/utils/processing_utils.py: `process_vision_info`). Those
    beyond the places in the prompt came with the response: a rollout of several turns appends what its environment
    shows.
    """
    extras = mapping_or_unreadable(getattr(sample, "metadata", None))
    group, index = getattr(sample, "group_index", None), getattr(sample, "index", None)
    return Sample(
        **pictured(lambda: attach(messages_of(getattr(sample, "prompt", "")), _images(sample))),
        response=getattr(sample, "response", ""),
        ground_truth=getattr(sample, "label", None),
        data_source=name_or_unreadable(data_source_of(sample)),
        group_id=None if group is None else name_or_unreadable(group),
        step=step_of_rollout(),
        split="val" if group is None else "train",
        extras={key: value for key, value in extras.items() if key != RECORD} if isinstance(extras, dict) else extras,
        id=None if index is None else name_or_unreadable(index),
        prompt=getattr(sample, "prompt", None),
    )


def data_source_of(sample: ROLLOUT_SAMPLE) -> Any:
    """The data source of a sample, see `to_sample`; nothing if it has none."""
    metadata = metadata_of(sample)
    return (
        metadata.get("data_source")
        or getattr(sample, "source", None)
        or metadata.get("source_name")
        or metadata.get("rm_type")
    )


def _images(sample: ROLLOUT_SAMPLE) -> Sequence[Any]:
    inputs = getattr(sample, "multimodal_inputs", None)
    return (inputs.get("images") if isinstance(inputs, Mapping) else None) or ()


def step_of_rollout() -> int | None:
    """The number of the rollout or evaluation under way, which slime's manager keeps for hooks of samples
    (slime/rollout/sample_hooks.py); None if this slime keeps none.
    """
    step = getattr(sys.modules.get("slime.rollout.sample_hooks"), "_current_rollout_id", None)
    return step if isinstance(step, int) else None


def metadata_of(sample: ROLLOUT_SAMPLE) -> Mapping[str, Any]:
    """The sample's metadata; empty if it is no mapping."""
    metadata = getattr(sample, "metadata", None)
    return metadata if isinstance(metadata, Mapping) else {}


def record_of(sample: ROLLOUT_SAMPLE) -> Mapping[str, Any]:
    """The record of a sample that this adapter has scored: its facts, whether its reward is a stand-in (`excluded`),
    and then also slime's `remove_sample` from before (`removed`). Empty for other samples.
    """
    record = metadata_of(sample).get(RECORD)
    return record if isinstance(record, Mapping) else {}


def include(sample: ROLLOUT_SAMPLE, facts: Mapping[str, Any]) -> None:
    """Record that a sample is scored, and undo an earlier `exclude`."""
    before = record_of(sample)
    if before.get("excluded"):
        sample.remove_sample = before["removed"]
    _keep(sample, {**facts, "excluded": False})


def exclude(args: Any, sample: ROLLOUT_SAMPLE, facts: Mapping[str, Any]) -> None:
    """Record that a sample has no reward, and keep it out of the loss. With REINFORCE++ only `post_process` can do the
    latter, see `mask`.
    """
    before = record_of(sample)
    removed = before["removed"] if before.get("excluded") else bool(getattr(sample, "remove_sample", False))
    _keep(sample, {**facts, "excluded": True, "removed": removed})
    if not keeps_a_token(args):
        sample.remove_sample = True


def _keep(sample: ROLLOUT_SAMPLE, record: Mapping[str, Any]) -> None:
    # In new metadata: samples of one rollout may share a metadata object.
    sample.metadata = {**metadata_of(sample), RECORD: dict(record)}


def is_aborted(sample: ROLLOUT_SAMPLE) -> bool:
    """Whether slime cut the sample's generation short."""
    return getattr(getattr(sample, "status", None), "name", "") == "ABORTED"


def group_of(sample: ROLLOUT_SAMPLE) -> Hashable:
    """The group of a training sample; None in evaluation, where slime numbers no groups."""
    index: Hashable = getattr(sample, "group_index", None)
    return index


def reward_of(args: Any, sample: ROLLOUT_SAMPLE) -> float | None:
    """The reward of a sample that may count in its group: a number that is finite in 32 bits, and no stand-in."""
    reward, key = getattr(sample, "reward", None), key_of(args, sample)
    value: Any = reward.get(key) if key and isinstance(reward, Mapping) else reward
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if fits_float32(number) and not record_of(sample).get("excluded") else None


def has_reward(args: Any, sample: ROLLOUT_SAMPLE) -> bool:
    """Whether the sample has a reward that may count in its group."""
    return reward_of(args, sample) is not None


def key_of(args: Any, sample: ROLLOUT_SAMPLE) -> str:
    """The key of the reward that slime reads, "" for a number: `reward_key` in training (slime/utils/types.py,
    `get_reward_value`), else `eval_reward_key or reward_key` (slime/rollout/sglang_rollout.py).
    """
    key = getattr(args, "reward_key", None)
    if group_of(sample) is None:
        key = getattr(args, "eval_reward_key", None) or key
    return str(key or "")


def keeps_a_token(args: Any) -> bool:
    """Whether every sample needs a token in the loss. REINFORCE++ ends the run at a sample without one
    (slime/utils/ppo_utils.py: `get_reinforce_plus_plus_returns`).
    """
    return getattr(args, "advantage_estimator", None) == "reinforce_plus_plus"


def mask(args: Any, sample: ROLLOUT_SAMPLE) -> None:
    """Keep a sample out of the loss: slime zeroes the loss mask of a sample with `remove_sample`."""
    if keeps_a_token(args):
        mask_but_one_token(sample)
    else:
        sample.remove_sample = True


def mask_but_one_token(sample: ROLLOUT_SAMPLE) -> None:
    """Keep all but the last token of a sample's response out of the loss."""
    length = getattr(sample, "response_length", 0)
    sample.remove_sample = not length
    if length:
        sample.loss_mask = [0] * (length - 1) + [1]


def flat(samples: Any) -> Iterator[ROLLOUT_SAMPLE]:
    """The samples of a group. Each of its rollouts may have become several samples."""
    for sample in samples:
        if isinstance(sample, (list, tuple)):
            yield from flat(sample)
        else:
            yield sample
