"""slime's `Sample` and the result of its dynamic filter (v0.3.1), and what slime makes of scored samples: normalised
rewards, loss masks, and the batch.

Lists take the place of tensors. What no reward code reads is left out.
"""

from __future__ import annotations

import copy
import enum
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ..fake_trainer import refuse_unknown

_FINISHED = {"stop": "completed", "length": "truncated", "abort": "aborted"}


@dataclass
class SlimeSample:
    """slime's `Sample`: one rollout.

    `index` counts all samples, `group_index` the prompts; both are None wherever slime leaves them None (`group_index`
    in an evaluation). `reward` is None until there is one. `loss_mask` has one 0 or 1 for each of the
    `response_length` tokens; None means that all count.
    """

    class Status(enum.Enum):
        """How far the generation came. No part of slime's rollout sets `FAILED`."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    def get_reward_value(self, args: Namespace) -> Any:
        """The number that trains: the reward, or its entry `args.reward_key` if that is set.

        Raises the errors of indexing the reward: `TypeError` for None or a number, `KeyError` for a missing key.
        """
        return self.reward[args.reward_key] if args.reward_key else self.reward

    def append_response_tokens(
        self,
        args: Namespace | None = None,
        *,
        tokens: Sequence[int] = (),
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str = "",
    ) -> None:
        """Append tokens of the policy, or with `trainable=False` of a tool, and extend the mask.

        `meta_info` is from the inference engine. Its `finish_reason` ("stop", "length" or "abort", in a mapping
        with the key `type`) sets the status.
        """
        self.response += text
        if tokens:
            before = self.response_length
            self.tokens = [*self.tokens, *tokens]
            self.response_length += len(tokens)
            mask = [1] * before if self.loss_mask is None else self.loss_mask
            self.loss_mask = [*mask, *[int(trainable)] * len(tokens)]
        reason = ((meta_info or {}).get("finish_reason") or {}).get("type")
        if reason in _FINISHED:
            self.status = SlimeSample.Status(_FINISHED[reason])


Row: TypeAlias = "str | list[dict[str, Any]] | Mapping[str, Any] | SlimeSample"
"""A prompt, a conversation, `{"prompt": ..., "label": ..., "metadata": {...}, "images": [...]}`, or a sample. Images
are Pillow images, as slime has them after it has read a row."""

Group: TypeAlias = "list[Any]"
"""The samples of one prompt; lists of samples if a custom generate function fans out."""


@dataclass
class DynamicFilterOutput:
    """The result of a dynamic sampling filter, as in slime's `slime.rollout.filter_hub.base_types`.

    `keep_when_insufficient`: keep the group anyway if dropping it would need another round of prompts.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def flat(samples: Any) -> list[SlimeSample]:
    """The samples of nested lists, in order."""
    return [one for part in samples for one in flat(part)] if isinstance(samples, list) else [samples]


def prompt_of(row: Row) -> SlimeSample:
    """Turn a row of a data set into a sample. Raises `TypeError` for a key that a row does not have."""
    if isinstance(row, SlimeSample):
        return copy.deepcopy(row)
    if isinstance(row, str | list):
        return SlimeSample(prompt=copy.deepcopy(row))
    refuse_unknown(row, ("prompt", "label", "metadata", "images"), "a row of prompts")
    if "prompt" not in row:
        raise TypeError(f"a row of prompts needs a 'prompt': {dict(row)!r:.200}")
    own = copy.deepcopy(dict(row))
    # What slime keeps of a row if there is a processor (slime/utils/processing_utils.py: `process_vision_info`).
    inputs = {"images": own["images"] or None, "videos": None} if "images" in own else None
    return SlimeSample(
        prompt=own["prompt"], label=own.get("label"), metadata=own.get("metadata") or {}, multimodal_inputs=inputs
    )


_GROUP_NORMALISED = ("grpo", "gspo", "cispo")


def post_process_rewards(args: Namespace, samples: Sequence[SlimeSample]) -> tuple[list[Any], list[Any]]:
    """slime's own `(raw_rewards, rewards)`, which a `--custom-reward-post-process-path` replaces.

    With all estimators but ppo the mean of its group is subtracted from a reward, and the result divided by the group's
    standard deviation. A group is `n_samples_per_prompt` consecutive
    samples if the batch has exactly as many samples as the flags say, else the whole batch. So one sample more or less
    (fan-out) changes the baseline of all.

    Raises `TypeError` for a reward that is None, or a dict without `reward_key`. NaN makes its group NaN.
    """
    raw = [sample.get_reward_value(args) for sample in samples]
    if args.advantage_estimator not in _GROUP_NORMALISED or not args.rewards_normalization:
        return raw, raw
    for reward in raw:
        if not isinstance(reward, (bool, int, float, np.number)):
            raise TypeError(f"must be real number, not {type(reward).__name__}")
    whole = len(raw) == args.n_samples_per_prompt * args.rollout_batch_size
    size = args.n_samples_per_prompt if whole else len(raw)
    with np.errstate(all="ignore"):
        rewards = np.array(raw, dtype=np.float32).reshape(-1, size)
        rewards = rewards - rewards.mean(axis=1, keepdims=True)
        if args.grpo_std_normalization:
            squares = np.square(rewards, dtype=np.float64).sum(axis=1, keepdims=True)
            rewards = rewards / (np.sqrt(squares / (size - 1)) + 1e-6)
    return raw, [float(reward) for reward in rewards.ravel()]


def convert_samples(
    samples: Sequence[SlimeSample], raw_rewards: Sequence[Any], rewards: Sequence[Any]
) -> dict[str, Any]:
    """The batch for slime's trainer; tensors are lists.

    It sets `loss_mask` of every sample, to zeros with `remove_sample`. Raises `AssertionError` for a wrong number of
    rewards or a wrong length of a mask.
    """
    assert len(raw_rewards) == len(samples), f"{len(raw_rewards)} raw rewards for {len(samples)} samples"
    assert len(rewards) == len(samples), f"{len(rewards)} rewards for {len(samples)} samples"
    for sample in samples:
        length = sample.response_length
        sample.loss_mask = [1] * length if sample.loss_mask is None else sample.loss_mask
        assert len(sample.loss_mask) == length, f"loss mask length {len(sample.loss_mask)} != response length {length}"
        if sample.remove_sample:
            sample.loss_mask = [0] * length
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": raw_rewards,
        "truncated": [int(sample.status is SlimeSample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
    }
