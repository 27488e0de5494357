"""Turns scored samples into slime's normalised rewards, loss masks, and batch for the trainer.

Like slime, this computes in 32-bit floats (`floats.py`). That matters if a group's rewards are equal but not exact in
32 bits: then the mean is off by one rounding, and dividing by a standard deviation near zero amplifies that.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from .floats import round32, std32, sum32
from .samples import SlimeSample

_GROUP_NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_STD_NORMALISED = ("grpo", "gspo", "cispo")


def _normalise(group: Sequence[float], *, by_std: bool) -> list[float]:
    mean = round32(sum32(group) / len(group))
    centred = [round32(value - mean) for value in group]
    if not by_std:
        return centred
    scale = round32(std32(centred) + round32(1e-6))
    return [round32(value / scale) for value in centred]


def _number(reward: Any) -> float:
    if reward is None or isinstance(reward, dict | str):
        raise TypeError(f"must be real number, not {type(reward).__name__}")
    return round32(float(reward))


def post_process_rewards(args: Namespace, samples: Sequence[SlimeSample]) -> tuple[list[Any], list[Any]]:
    """slime's own `(raw_rewards, rewards)`, which a `--custom-reward-post-process-path` replaces.

    With grpo, gspo, cispo and reinforce_plus_plus_baseline the mean of its group is subtracted from a reward; with the
    first three the result is divided by the group's standard deviation. A group is `n_samples_per_prompt` consecutive
    samples if the batch has exactly as many samples as the flags say, else the whole batch. So one sample more or less
    (fan-out) changes the baseline of all.

    Raises `TypeError` for a reward that is None, or a dict without `reward_key`. NaN makes its group NaN.
    """
    raw = [sample.get_reward_value(args) for sample in samples]
    if args.advantage_estimator not in _GROUP_NORMALISED or not args.rewards_normalization:
        return raw, raw
    numbers = [_number(reward) for reward in raw]
    whole = len(numbers) == args.n_samples_per_prompt * args.rollout_batch_size
    size = args.n_samples_per_prompt if whole else len(numbers)
    by_std = args.advantage_estimator in _STD_NORMALISED and args.grpo_std_normalization
    groups = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    return raw, [reward for group in groups for reward in _normalise(group, by_std=by_std)]


def check_rollout_ids(node: Any, depth: int = 0) -> None:
    """Raise `AssertionError`, as slime does, if samples of one generation do not share a `rollout_id`: the loss would
    count the generation several times.
    """
    if isinstance(node, SlimeSample):
        return
    assert isinstance(node, list), f"a rollout returns lists of samples, not {type(node).__name__}"
    if not node or not isinstance(node[0], SlimeSample):
        for item in node:
            check_rollout_ids(item, depth + 1)
    elif depth >= 2 and len(node) > 1:
        ids = [sample.rollout_id for sample in node]
        assert None not in ids, f"one generation gave {len(node)} samples: set the same rollout_id on each ({ids})"
        assert len(set(ids)) == 1, f"the samples of one generation must share a rollout_id, they have {ids}"


def convert_samples(
    args: Namespace, samples: Sequence[SlimeSample], raw_rewards: Sequence[Any], rewards: Sequence[Any]
) -> dict[str, Any]:
    """The batch for slime's trainer; tensors are lists.

    It sets `loss_mask` of every sample, to zeros with `remove_sample`. `rollout_mask_sums` has for each sample the
    trained tokens of its rollout, the denominator of the loss. If any sample has `metadata["raw_reward"]`, that is its
    raw reward, and the others' is `sample.reward`. Raises `AssertionError` for a wrong number of rewards or a wrong
    length of a mask.
    """
    assert len(raw_rewards) == len(samples), f"{len(raw_rewards)} raw rewards for {len(samples)} samples"
    assert len(rewards) == len(samples), f"{len(rewards)} rewards for {len(samples)} samples"
    for sample in samples:
        length = sample.response_length
        if sample.loss_mask is None:
            sample.loss_mask = [1] * length
        assert len(sample.loss_mask) == length, f"loss mask length {len(sample.loss_mask)} != response length {length}"
        if sample.remove_sample:
            sample.loss_mask = [0] * length
    masks = [sample.loss_mask or [] for sample in samples]
    rollout_ids = _rollout_ids(samples)
    trained: dict[int, int] = {}
    for rollout_id, mask in zip(rollout_ids, masks, strict=True):
        trained[rollout_id] = trained.get(rollout_id, 0) + sum(mask)
    data: dict[str, Any] = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": raw_rewards,
        "truncated": [int(sample.status is SlimeSample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": rollout_ids,
        "loss_masks": masks,
        "rollout_mask_sums": [trained[rollout_id] for rollout_id in rollout_ids],
    }
    if any(sample.metadata and "raw_reward" in sample.metadata for sample in samples):
        data["raw_reward"] = [(sample.metadata or {}).get("raw_reward", sample.reward) for sample in samples]
    first = samples[0]
    if first.metadata and "round_number" in first.metadata:
        data["round_number"] = [sample.metadata["round_number"] for sample in samples]
    if first.rollout_log_probs is not None:
        data["rollout_log_probs"] = [sample.rollout_log_probs for sample in samples]
    if first.train_metadata is not None:
        data["metadata"] = [sample.train_metadata for sample in samples]
    if any(sample.multimodal_train_inputs is not None for sample in samples):
        data["multimodal_train_inputs"] = [sample.multimodal_train_inputs for sample in samples]
    if first.teacher_log_probs is not None:
        data["teacher_log_probs"] = [sample.teacher_log_probs for sample in samples]
    if first.metadata is not None:
        data["source_names"] = [_source_of(sample) for sample in samples]
    return data


def _rollout_ids(samples: Sequence[SlimeSample]) -> list[int]:
    taken = {sample.rollout_id for sample in samples if sample.rollout_id is not None}
    ids = []
    free = 0
    for sample in samples:
        chosen = sample.rollout_id
        if chosen is None:
            while free in taken:
                free += 1
            taken.add(free)
            chosen = free
        ids.append(chosen)
    return ids


def _source_of(sample: SlimeSample) -> Any:
    return getattr(sample, "source", None) or (sample.metadata or {}).get("source_name") or "unknown"
