"""slime's samples as the core's, and where on slime's sample our facts are kept.

slime's `Sample` (slime/utils/types.py) is taken by its attributes and never imported, so that these functions also take
the samples of a fake trainer, and the bare objects that slime's contract tests hand to plugins.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from qreward_plugins import Message, Sample

RECORD = "qreward"
"""The key of `sample.metadata` that holds the record of a sample."""

ROLLOUT_SAMPLE = Any
"""slime's `Sample`, or what looks like one."""


def to_sample(sample: ROLLOUT_SAMPLE) -> Sample:
    """One rollout as the core's sample. `metadata` becomes its extras; the data source is `metadata["data_source"]`,
    else what slime itself calls the source (slime/utils/data.py: `source`, `metadata["source_name"]`), else `rm_type`.
    """
    metadata = metadata_of(sample)
    source = (
        metadata.get("data_source")
        or getattr(sample, "source", None)
        or metadata.get("source_name")
        or metadata.get("rm_type")
    )
    group, index = getattr(sample, "group_index", None), getattr(sample, "index", None)
    return Sample(
        messages=_messages(getattr(sample, "prompt", "")),
        response=getattr(sample, "response", "") or "",
        ground_truth=getattr(sample, "label", None),
        data_source=str(source or ""),
        group_id=None if group is None else str(group),
        split="val" if group is None else "train",
        extras={key: value for key, value in metadata.items() if key != RECORD},
        id=None if index is None else str(index),
    )


def metadata_of(sample: ROLLOUT_SAMPLE) -> Mapping[str, Any]:
    """The sample's metadata; empty where it has none that is a mapping."""
    metadata = getattr(sample, "metadata", None)
    return metadata if isinstance(metadata, Mapping) else {}


def record_of(sample: ROLLOUT_SAMPLE) -> Mapping[str, Any]:
    """What we know of a sample that was scored here: its facts, whether its reward is a stand-in (`excluded`), and then
    the `loss_mask` it had before; empty for any other.
    """
    record = metadata_of(sample).get(RECORD)
    return record if isinstance(record, Mapping) else {}


def keep_record(sample: ROLLOUT_SAMPLE, record: Mapping[str, Any]) -> None:
    """Put the record on the sample. Samples of one rollout may share their metadata, so it is never changed in
    place.
    """
    sample.metadata = {**metadata_of(sample), RECORD: dict(record)}


def is_aborted(sample: ROLLOUT_SAMPLE) -> bool:
    """Whether slime cut the sample's generation short."""
    return getattr(getattr(sample, "status", None), "name", "") == "ABORTED"


def group_of(sample: ROLLOUT_SAMPLE) -> Hashable:
    """The group of a training sample; None in evaluation, where slime numbers no groups."""
    index: Hashable = getattr(sample, "group_index", None)
    return index


def has_reward(args: Any, sample: ROLLOUT_SAMPLE) -> bool:
    """Whether the sample has a reward that may count in its group: a finite number that is no stand-in."""
    return not record_of(sample).get("excluded") and finite(value_of(args, sample)) is not None


def value_of(args: Any, sample: ROLLOUT_SAMPLE) -> Any:
    """The value that trains, as `Sample.get_reward_value` picks it (slime/utils/types.py); None where there is none."""
    reward, key = getattr(sample, "reward", None), getattr(args, "reward_key", None)
    return reward.get(key) if key and isinstance(reward, Mapping) else reward


FLOAT32_MAX = 3.4028234663852886e38
"""Trainers compute with 32 bits; what is larger is infinite there."""


def mask(args: Any, sample: ROLLOUT_SAMPLE) -> None:
    """Keep a sample out of the loss. slime zeroes the loss mask of a removed sample when it converts the batch; but its
    REINFORCE++ ends the run at a sample without any token in the loss (slime/utils/ppo_utils.py), so there one is left.
    """
    if getattr(args, "advantage_estimator", None) == "reinforce_plus_plus":
        mask_but_one_token(sample)
    else:
        sample.remove_sample = True


def mask_but_one_token(sample: ROLLOUT_SAMPLE) -> None:
    """Keep all but the last token of a sample's response out of the loss."""
    length = getattr(sample, "response_length", 0)
    sample.remove_sample = not length
    if length:
        sample.loss_mask = [0] * (length - 1) + [1]


def finite(value: Any) -> float | None:
    """A value as a number that is finite in 32 bits; None where it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= FLOAT32_MAX else None


def flat(samples: Any) -> Iterator[ROLLOUT_SAMPLE]:
    """The samples of a group, whose rollouts may each have become several."""
    for sample in samples:
        if isinstance(sample, (list, tuple)):
            yield from flat(sample)
        else:
            yield sample


_TEMPLATES = (
    # ChatML (Qwen), Llama 3 and GLM: how `--apply-chat-template` writes a turn. Each stops where the next turn begins.
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<content>.*?)(?:<\|im_end\|>|(?=<\|im_start\|>)|\Z)", re.DOTALL),
    re.compile(
        r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\s*(?P<content>.*?)"
        r"(?:<\|eot_id\|>|(?=<\|start_header_id\|>)|\Z)",
        re.DOTALL,
    ),
    re.compile(
        r"<\|(?P<role>system|user|assistant|observation)\|>\n?(?P<content>.*?)"
        r"(?=<\|(?:system|user|assistant|observation)\|>|\Z)",
        re.DOTALL,
    ),
)


def _messages(prompt: Any) -> list[Message]:
    """The messages of a prompt. With `--apply-chat-template` slime keeps only the templated text; where its template
    is a known one the messages are read back out of it, so that the judge sees what the policy was asked.
    """
    if not isinstance(prompt, str):
        return [{"role": str(turn.get("role", "user")), "content": _text(turn.get("content"))} for turn in prompt or ()]
    for template in _TEMPLATES:
        turns = [(found["role"], found["content"].strip()) for found in template.finditer(prompt)]
        if turns and turns[-1][0] == "assistant":
            turns.pop()  # the opening of the response
        if turns:
            return [{"role": role, "content": content} for role, content in turns]
    return [{"role": "user", "content": prompt}]


def _text(content: Any) -> str:
    """A message's text; of content in parts the texts, and the kind of every other part in brackets."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else ()
    return "\n".join(
        str(part["text"]) if "text" in part else f"[{part.get('type', 'attachment')}]"
        for part in parts
        if isinstance(part, Mapping)
    )
