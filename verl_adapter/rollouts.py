"""Turns verl's rollouts into samples: one row of a `DataProto` becomes one `Sample`.

A reward function gets the same `extra_info` as from verl's own managers, key by key
(verl/experimental/reward_loop/reward_manager/naive.py), so that it works here as it did there.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

from qreward_plugins import Cause, Failed, InputError, Message, Sample
from qreward_plugins.adapters import (
    Image,
    Unreadable,
    described_error,
    mapping_or_unreadable,
    name_or_unreadable,
    read_or_unreadable,
)

from .response_tokens import POLICY, ResponseTokens

VALIDATION = "qreward_validation"
"""The key in `extra_info` with which `validation` marks validation rows. verl does not mark them."""

_numbers = itertools.count()

RESPONSE_IMAGES = "qreward_images"
"""The key of an agent loop's `extra_fields` for images that belong to the response."""


def to_sample(item: Any, tokens: ResponseTokens, *, data_source_column: str = "data_source") -> Sample:
    """Turn one row with the `tokens` of its response into a sample.

    Images of the prompt are parts of `raw_prompt` (utils/dataset/rl_dataset.py: `_build_messages`). verl does not pass
    the images of tools to reward managers; an agent loop of your own can, in `extra_fields["qreward_images"]`.
    """
    columns: Mapping[str, Any] = item.non_tensor_batch
    uid = columns.get("uid")
    return Sample(
        messages=read_or_unreadable(lambda: _messages(item, tokens)),
        response=tokens.text,
        ground_truth=read_or_unreadable(lambda: _ground_truth(columns)),
        data_source=_data_source(columns, data_source_column),
        **_place(columns),
        extras=read_or_unreadable(lambda: _extras(columns)),
        id=None if uid is None else f"{uid}/{_session(columns)}",
        response_images=read_or_unreadable(lambda: _response_images(columns)),
        turns=tokens.turns(),
    )


def _response_images(columns: Mapping[str, Any]) -> list[Image]:
    own = columns.get("tool_extra_fields")
    added = own.get(RESPONSE_IMAGES) if isinstance(own, Mapping) else None
    return [Image.of(image) for image in added or ()]


def _extras(columns: Mapping[str, Any]) -> dict[str, Any]:
    info, tools = (mapping_or_unreadable(columns.get(name)) for name in ("extra_info", "tool_extra_fields"))
    for column in (info, tools):
        if isinstance(column, Unreadable):
            raise InputError(column.problem)
    extras = {key: value for key, value in info.items() if key != VALIDATION}
    extras.update((key, value) for key, value in tools.items() if key not in (RESPONSE_IMAGES, POLICY))
    extras["num_turns"] = _plain(columns.get("__num_turns__"))
    extras["rollout_reward_scores"] = columns.get("reward_scores") or {}
    return extras


def _ground_truth(columns: Mapping[str, Any]) -> Any:
    reward_model = mapping_or_unreadable(columns.get("reward_model"))
    return reward_model if isinstance(reward_model, Unreadable) else reward_model.get("ground_truth")


def _data_source(columns: Mapping[str, Any], column: str) -> Any:
    """The name in the column. A value that is no name (None, NaN) is kept, and fails that sample later."""
    value = columns.get(column, "")
    return value if value is None else name_or_unreadable(value)


def _place(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The group, the step and the split of a row."""
    uid, step = columns.get("uid"), _plain(columns.get("global_steps"))
    return {
        "group_id": None if uid is None else str(uid),
        "step": step if isinstance(step, int) else None,
        "split": "val" if _is_validation(columns) else None,
    }


def _is_validation(columns: Mapping[str, Any]) -> bool:
    info = columns.get("extra_info")
    return isinstance(info, Mapping) and bool(info.get(VALIDATION))


def _session(columns: Mapping[str, Any]) -> str:
    """What tells a sample from its siblings: V1 numbers its sessions, the other trainers number nothing."""
    session = _plain(columns.get("session_id"))
    return f"{os.getpid()}.{next(_numbers)}" if session is None else str(session)


def unreadable(item: Any, error: Exception) -> tuple[Sample, Failed]:
    """The failure of a row for which `to_sample` raised `error`, and a sample with its group, step and split."""
    detail = f"the rollout cannot be read: {described_error(error)}"
    return Sample(messages=[], response="", **_place(item.non_tensor_batch)), Failed(Cause.INFRA, "input", detail)


def _messages(item: Any, tokens: ResponseTokens) -> list[Message]:
    columns: Mapping[str, Any] = item.non_tensor_batch
    for column in ("raw_prompt", "prompt"):
        prompt = columns.get(column)
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if prompt is not None and len(prompt):
            return [dict(message) for message in prompt]  # type: ignore[misc]
    ids = item.batch["prompts"]
    mask = item.batch["attention_mask"][: ids.shape[-1]].bool()
    return [{"role": "user", "content": tokens.decode(ids[mask])}]


def _plain(value: Any) -> Any:
    """A numpy scalar as a Python value."""
    return value.item() if hasattr(value, "item") else value
