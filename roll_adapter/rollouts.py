"""ROLL's rollouts as samples: the rows of a `DataProto` become `Sample`s.

The prompt is taken from the data set's messages where ROLL still carries them, and else read back out of the tokens,
without padding and with the special tokens that tell the turns apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from qreward_plugins import Message, Sample
from qreward_plugins.prompts import messages_of
from qreward_plugins.sample_check import name_or_unreadable, read_or_unreadable

_OWN_COLUMNS = frozenset({"id", "ground_truth", "domain", "tag", "rollout_id", "messages", "prompt"})
_HEAVY_COLUMNS = frozenset({"multi_modal_data", "multi_modal_inputs", "routed_experts", "token_type_ids"})


def to_samples(data: Any, tokenizer: Any) -> list[Sample]:
    """The rows of a batch (roll/distributed/scheduler/protocol.py) as samples, in order; `tokenizer` is the actor's.

    The data source is the row's tag, else its domain; the group is its prompt in this step. Decoding is slow: keep it
    off the event loop.
    """
    # ROLL moves the padding of each row to its end and keeps the masks for what results, not for `prompts` and
    # `responses`, which were cut before (utils/functionals.py, `postprocess_generate`).
    rows, written, asked = (data.batch[name] for name in ("input_ids", "response_mask", "prompt_mask"))
    texts = tokenizer.batch_decode(
        [row[mask.bool()] for row, mask in zip(rows, written, strict=True)], skip_special_tokens=True
    )
    step = data.meta_info.get("global_step")
    samples = []
    for row, text in enumerate(texts):
        columns = {name: _plain(values[row]) for name, values in data.non_tensor_batch.items()}
        decode = partial(tokenizer.decode, rows[row][asked[row].bool()], skip_special_tokens=False)
        messages = read_or_unreadable(partial(_prompt, columns, decode))
        samples.append(
            Sample(
                messages=messages,
                response=text,
                ground_truth=columns.get("ground_truth"),
                data_source=name_or_unreadable(columns.get("tag") or columns.get("domain")),
                group_id=prompt_of(data, row),
                step=step if isinstance(step, int) else None,
                extras={name: value for name, value in columns.items() if name not in _OWN_COLUMNS | _HEAVY_COLUMNS},
                id=name_or_unreadable(columns.get("rollout_id") or columns.get("id") or row),
            )
        )
    return samples


def prompt_of(data: Any, row: int) -> str:
    """What tells the prompt of a row from those of others in the same call. In ROLL's batch path that is the number of
    the prompt in the batch (generate_scheduler.py, `origin_prompt_id`), because a data set may repeat its ids.
    """
    if "origin_prompt_id" in data.batch.keys():  # noqa: SIM118 (a TensorDict refuses `in`)
        return str(int(data.batch["origin_prompt_id"][row]))
    ids = data.non_tensor_batch.get("id")
    return str(_plain(ids[row])) if ids is not None else ""


def is_streamed(data: Any) -> bool:
    """Whether the call is of ROLL's streaming path, which names each rollout; the batch path does not."""
    return "rollout_id" in data.non_tensor_batch


def is_validation(data: Any) -> bool:
    """Whether the call is of a validation. ROLL does not say so, but only training carries `collect_unfinished`
    (rlvr_pipeline.py), and only calls of a pipeline carry either.
    """
    return "is_offload_states" in data.meta_info and "collect_unfinished" not in data.meta_info


def _prompt(columns: Mapping[str, Any], decode: Callable[[], str]) -> list[Message]:
    return _messages(columns) or messages_of(decode())


def _messages(columns: Mapping[str, Any]) -> list[Message]:
    """The data set's messages, which may be a list or its JSON text, up to the first answer."""
    told = columns.get("messages")
    if isinstance(told, str):
        try:
            told = json.loads(told)
        except ValueError:
            return []
    if not isinstance(told, (list, tuple)) or not all(isinstance(turn, Mapping) for turn in told):
        return []
    asked = []
    for turn in messages_of(told):
        if turn["role"] == "assistant":
            break
        asked.append(turn)
    return asked


def _plain(value: Any) -> Any:
    """A numpy scalar as Python's own."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
