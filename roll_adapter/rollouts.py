"""Turns ROLL's rollouts into samples: each row of a `DataProto` becomes one `Sample`.

The prompt is the data set's messages if ROLL still carries them. Otherwise it is decoded from the tokens, without
padding and with the special tokens that separate the turns. Images come from the column `multi_modal_data`, which a
pipeline for vision models keeps until the reward is there (datasets/collator.py, rlvr_vlm_pipeline.py).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from qreward_plugins import Message, Sample
from qreward_plugins.adapters import attach, messages_of, name_or_unreadable, pictured

_OWN_COLUMNS = frozenset({"id", "ground_truth", "domain", "tag", "rollout_id", "messages", "prompt"})
_HEAVY_COLUMNS = frozenset({"multi_modal_data", "multi_modal_inputs", "routed_experts", "token_type_ids"})


def to_samples(data: Any, tokenizer: Any) -> list[Sample]:
    """Turn the rows of a batch (roll/distributed/scheduler/protocol.py) into samples, in order; `tokenizer` is the
    actor's.

    The data source is the row's tag, else its domain. The group is its prompt in this step. Decoding is slow: do not
    call this on the event loop.
    """
    # ROLL moves the padding of each row to its end. The masks fit the result, but not `prompts` and `responses`,
    # which were cut out before (utils/functionals.py, `postprocess_generate`).
    rows, written, asked = (data.batch[name] for name in ("input_ids", "response_mask", "prompt_mask"))
    texts = tokenizer.batch_decode(
        [row[mask.bool()] for row, mask in zip(rows, written, strict=True)], skip_special_tokens=True
    )
    step = data.meta_info.get("global_step")
    samples = []
    for row, text in enumerate(texts):
        columns = {name: _plain(values[row]) for name, values in data.non_tensor_batch.items()}
        decode = partial(tokenizer.decode, rows[row][asked[row].bool()], skip_special_tokens=False)
        samples.append(
            Sample(
                **pictured(partial(_prompt, columns, decode)),
                response=text,
                ground_truth=columns.get("ground_truth"),
                data_source=name_or_unreadable(columns.get("tag") or columns.get("domain")),
                group_id=prompt_of(data, row),
                step=step if isinstance(step, int) else None,
                split="val" if is_validation(data) else "train",
                extras={name: value for name, value in columns.items() if name not in _OWN_COLUMNS | _HEAVY_COLUMNS},
                id=name_or_unreadable(columns.get("rollout_id") or columns.get("id") or row),
            )
        )
    return samples


def prompt_of(data: Any, row: int) -> str:
    """The identifier of a row's prompt within its call. In ROLL's batch path this is the number of the prompt in the
    batch (generate_scheduler.py, `origin_prompt_id`), because a data set may repeat its ids.
    """
    if "origin_prompt_id" in data.batch.keys():  # noqa: SIM118 (a TensorDict refuses `in`)
        return str(int(data.batch["origin_prompt_id"][row]))
    ids = data.non_tensor_batch.get("id")
    return str(_plain(ids[row])) if ids is not None else ""


def is_streamed(data: Any) -> bool:
    """Whether the call comes from ROLL's streaming path. Only that path sets rollout ids."""
    return "rollout_id" in data.non_tensor_batch


def is_validation(data: Any) -> bool:
    """Whether the call belongs to a validation. ROLL does not mark it, but only training has `collect_unfinished`
    (rlvr_pipeline.py), and only calls of a pipeline have `is_offload_states`.
    """
    return "is_offload_states" in data.meta_info and "collect_unfinished" not in data.meta_info


def _prompt(columns: Mapping[str, Any], decode: Callable[[], str]) -> tuple[list[Message], list[Any]]:
    """The messages of the prompt with its images, and the images that it has no place for."""
    return attach(_messages(columns) or messages_of(decode()), _images(columns))


def _images(columns: Mapping[str, Any]) -> list[Any]:
    """The images for the inference engine: `multi_modal_data["image"]`, within what is sent to the engine."""
    data = columns.get("multi_modal_data")
    inner = data.get("multi_modal_data", data) if isinstance(data, Mapping) else None
    images = inner.get("image") if isinstance(inner, Mapping) else None
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]


def _messages(columns: Mapping[str, Any]) -> list[Message]:
    """The data set's messages, which may be a list or its JSON text, up to the first answer."""
    turns = columns.get("messages")
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except ValueError:
            return []
    if not isinstance(turns, (list, tuple)) or not all(isinstance(turn, Mapping) for turn in turns):
        return []
    return list(itertools.takewhile(lambda turn: turn["role"] != "assistant", messages_of(turns)))


def _plain(value: Any) -> Any:
    """A numpy scalar as a Python value."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
