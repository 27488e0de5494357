"""Trajectories of the V1 trainer's queue as batches: rows of any length, several outputs of a session, padding."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..tensors import padded
from .protocol import TensorColumns, VerlDataProto

PADDED_PROMPT = 127
"""Tokens in the prompt of a row that only fills up a mini-batch."""

Row = Mapping[str, Any]


def training_batch(rows: Sequence[Row]) -> VerlDataProto:
    """The batch that advantages are computed of. Raises `KeyError` if a row has no score: no row has one then."""
    if not all("rm_scores" in row for row in rows):
        raise KeyError('key "rm_scores" not found in TensorDict')
    tensors = {name: padded([row[name] for row in rows]) for name in ("prompts", "responses", "response_mask")}
    scores = padded([row["rm_scores"] for row in rows], dtype=np.float32)
    return VerlDataProto(
        TensorColumns({**tensors, "rm_scores": scores, "token_level_scores": scores}, batch_size=len(rows)),
        {"uid": np.array([str(row["uid"]) for row in rows], dtype=object)},
    )


def rewards_batch(rows: Sequence[Row]) -> VerlDataProto:
    """The batch that a colocated reward model is asked about: a manager learns the prompts and nothing else."""
    prompts, responses = ([row[name] for row in rows] for name in ("prompts", "responses"))
    masks = [padded([[1] * len(ids) for ids in each]) for each in (prompts, responses)]
    tensors = {
        "prompts": padded(prompts),
        "responses": padded(responses),
        "attention_mask": np.concatenate(masks, axis=1),
    }
    raw = np.empty(len(rows), dtype=object)
    raw[:] = [row["raw_prompt"] for row in rows]
    return VerlDataProto(TensorColumns(tensors, batch_size=len(rows)), {"raw_prompt": raw})


def padding_row(row: Row, uid: str, number: int, eos: int) -> dict[str, Any]:
    """A row that fills up a mini-batch: a copy of another one, without a token that trains."""
    return copy.deepcopy(dict(row)) | {
        "prompts": [eos] * PADDED_PROMPT,
        "responses": [eos],
        "response_mask": [0],
        "rm_scores": np.zeros(1, dtype=np.float32),
        "num_turns": 0,
        "uid": uid,
        "session_id": number,
        "is_padding": True,
    }


def add_infos(infos: dict[str, list[Any]], scores: Sequence[float], rows: Sequence[Row]) -> None:
    """Append the reward manager's values for rows of a validation: None where a row or those before it lack a key."""
    before = len(infos["reward"])
    infos["reward"] += scores
    for place, row in enumerate(rows):
        for name in infos:
            if name != "reward" and name not in row:
                infos[name].append(None)
        for name, value in row.items():
            infos.setdefault(name, [None] * (before + place)).append(value)


__all__ = [
    "add_infos",
    "padding_row",
    "rewards_batch",
    "training_batch",
]
