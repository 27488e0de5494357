"""verl's rollouts as samples: one row of a `DataProto` becomes one `Sample`.

What verl's own managers hand to a reward function is kept key by key (verl/experimental/reward_loop/reward_manager/
naive.py), so that a function which worked there finds the same `extra_info` here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from qreward_plugins import Cause, Failed, InputError, Message, Sample
from qreward_plugins.sample_check import Unreadable, mapping_or_unreadable, name_or_unreadable, read_or_unreadable

Decode = Callable[[Any], str]

VALIDATION = "qreward_validation"
"""The key in `extra_info` by which `trainer` marks the rows of validation, for verl itself does not."""

PADDING = "qreward_padding"
"""The key in `extra_info` by which `trainer` marks copies that only fill up a batch: verl drops their scores."""

_VALIDATION_SPLITS = frozenset({"val", "valid", "validation", "dev", "test", "eval", "evaluation"})


def response_ids(item: Any) -> Any:
    """The token ids of the response of one row (`DataProtoItem`), without padding.

    verl pads several outputs of one trajectory to the right, where the attention mask no longer lines up with the
    responses; its column `response_len` is right then, and older versions that lack it pass single outputs only.
    """
    ids = item.batch["responses"]
    length = item.non_tensor_batch.get("response_len")
    if length is None:
        length = item.batch["attention_mask"][-ids.shape[-1] :].sum()
    return ids[: int(length)]


def to_sample(item: Any, response: str, decode: Decode, *, data_source_column: str = "data_source") -> Sample:
    """One row as a sample; `response` is its decoded response, `decode` decodes the prompt where its text is
    missing.
    """
    columns: Mapping[str, Any] = item.non_tensor_batch
    info = columns.get("extra_info")
    step = _plain(columns.get("global_steps"))
    uid = columns.get("uid")
    return Sample(
        messages=read_or_unreadable(lambda: _messages(item, decode)),
        response=response,
        ground_truth=read_or_unreadable(lambda: _ground_truth(columns)),
        data_source=_data_source(columns, data_source_column),
        group_id=None if uid is None else str(uid),
        step=step if isinstance(step, int) else None,
        split="val" if isinstance(info, Mapping) and info.get(VALIDATION) else None,
        extras=read_or_unreadable(lambda: _extras(columns)),
        id=None if uid is None else f"{uid}/{_plain(columns.get('session_id', ''))}",
    )


def _extras(columns: Mapping[str, Any]) -> dict[str, Any]:
    info, tools = (mapping_or_unreadable(columns.get(name)) for name in ("extra_info", "tool_extra_fields"))
    for column in (info, tools):
        if isinstance(column, Unreadable):
            raise InputError(column.problem)
    extras = {key: value for key, value in info.items() if key not in (VALIDATION, PADDING)}
    extras.update(tools)
    extras["num_turns"] = _plain(columns.get("__num_turns__"))
    extras["rollout_reward_scores"] = columns.get("reward_scores") or {}
    return extras


def _ground_truth(columns: Mapping[str, Any]) -> Any:
    reward_model = mapping_or_unreadable(columns.get("reward_model"))
    return reward_model if isinstance(reward_model, Unreadable) else reward_model.get("ground_truth")


def _data_source(columns: Mapping[str, Any], column: str) -> Any:
    """The name in the column; what is none (None, NaN) stays, to be found as that sample's failure."""
    value = columns.get(column, "")
    return value if value is None else name_or_unreadable(value)


def looks_like_validation(item: Any) -> bool:
    """Whether a row that is not marked says of itself that it is not from the training set, as those do that verl's own
    data scripts make (`extra_info.split`).
    """
    info = item.non_tensor_batch.get("extra_info")
    return isinstance(info, Mapping) and str(info.get("split", "")).lower() in _VALIDATION_SPLITS


def is_padding(item: Any) -> bool:
    """Whether a row only fills up a batch."""
    info = item.non_tensor_batch.get("extra_info")
    return isinstance(info, Mapping) and bool(info.get(PADDING))


def session_of(item: Any) -> tuple[str, str]:
    """Return (session, generation): the first identifies a sample in its group, the second its present response.

    Only the V1 trainer names sessions, in which it may generate a response anew; elsewhere each call is a session.
    """
    response = uuid.uuid4().hex
    session = _plain(item.non_tensor_batch.get("session_id"))
    return (response if session is None else str(session)), response


def unreadable(item: Any, error: Exception) -> tuple[Sample, Failed]:
    """The failure of a row that `to_sample` raised `error` for, and a sample with its group, step and split."""
    columns: Mapping[str, Any] = item.non_tensor_batch
    info = columns.get("extra_info")
    uid, step = columns.get("uid"), _plain(columns.get("global_steps"))
    sample = Sample(
        messages=[],
        response="",
        group_id=None if uid is None else str(uid),
        step=step if isinstance(step, int) else None,
        split="val" if isinstance(info, Mapping) and info.get(VALIDATION) else None,
    )
    detail = f"the rollout cannot be read: {type(error).__name__}: {str(error)[:200]}"
    return sample, Failed(Cause.INFRA, "input", detail)


def _messages(item: Any, decode: Decode) -> list[Message]:
    columns: Mapping[str, Any] = item.non_tensor_batch
    for column in ("raw_prompt", "prompt"):
        prompt = columns.get(column)
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if prompt is not None and len(prompt):
            return [dict(message) for message in prompt]  # type: ignore[misc]
    ids = item.batch["prompts"]
    mask = item.batch["attention_mask"][: ids.shape[-1]].bool()
    return [{"role": "user", "content": decode(ids[mask])}]


def _plain(value: Any) -> Any:
    """A numpy scalar as Python's own."""
    return value.item() if hasattr(value, "item") else value
