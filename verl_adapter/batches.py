"""The rows of a training batch in the trainer's process, with the extra info that reward managers gave to each.

The legacy trainer and those derived from it have the extra info as columns of the batch (`ColumnRows`). In V1 it is in
the transfer queue, in which trajectories wait (`QueuedRows`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from .rewards import DENSE, PREFIX, Told

_FIELD = "extra_fields"
_INFO = "reward_extra_info"
_SCORES = "rm_scores"

_PADDING = "pad"
"""How the uid of a row begins that only fills up a batch (trainer/ppo/padding_utils.py). Other uids are uuid4."""


class Rows(ABC):
    """The rows of a batch. `infos` has the extra info of each, and `sessions` the sample that it belongs to: all rows
    of a session have the same extra info, and the one that was judged is in `judged`.
    """

    def __init__(
        self, data: Any, infos: list[Mapping[str, Any]], sessions: Sequence[str], judged: Iterable[int]
    ) -> None:
        self.data = data
        self.infos = infos
        self.sessions = sessions
        self.judged = list(judged)
        self.uids = list(map(str, data.non_tensor_batch.get("uid", sessions)))

    def is_padding(self, row: int) -> bool:
        """Whether a row only fills up the batch."""
        return self.uids[row].startswith(_PADDING)

    def put(self, told: Mapping[int, Told]) -> None:
        """Give rows what `run_single` would have returned for them. Their rewards so far are zeros."""
        for row, each in told.items():
            self.infos[row] = each["reward_extra_info"]
        ends = self._write(told)
        self._add({row: [(ends[row], each["reward_score"])] for row, each in told.items()})

    def add_parts(self) -> None:
        """Add what the steps and turns of responses add to the rewards of tokens (`DENSE`)."""
        self._add({row: json.loads(self.infos[row].get(DENSE) or "[]") for row in self.judged})

    @abstractmethod
    def _write(self, told: Mapping[int, Told]) -> Mapping[int, int]:
        """Write extra info, and rewards, to where the trainer reads them later. Return the last tokens of these rows'
        responses.
        """

    def _add(self, parts: Mapping[int, Iterable[tuple[int, float]]]) -> None:
        """Add pairs of token and number to the rewards of tokens, by rows."""
        if not any(parts.values()):
            return
        for name in ("token_level_scores", "token_level_rewards"):
            # They may be one tensor.
            rewards = self.data.batch[name] = self.data.batch[name].clone()
            for row, added in parts.items():
                for token, reward in added:
                    rewards[row, token] += reward


class ColumnRows(Rows):
    """Rows with their extra info in columns. Each is a sample."""

    def __init__(self, data: Any) -> None:
        columns, every = data.non_tensor_batch, range(len(data))
        self._names = [name for name in columns if name.startswith(PREFIX) or name == "acc"]
        infos: list[Mapping[str, Any]] = [{name: columns[name][row] for name in self._names} for row in every]
        super().__init__(data, infos, list(map(str, every)), every)

    def _write(self, told: Mapping[int, Told]) -> Mapping[int, int]:
        for name in self._names:
            self.data.non_tensor_batch[name] = np.array([info.get(name) for info in self.infos])
        mask = self.data.batch["attention_mask"][:, -self.data.batch["responses"].shape[-1] :]
        return {row: int(mask[row].sum()) - 1 for row in told}


class QueuedRows(Rows):
    """Rows with their extra info in V1's queue, by their keys there. A session is a sample, and may have several rows,
    of which the last one was judged.
    """

    def __init__(self, data: Any, keys: Sequence[str]) -> None:
        self._keys = keys
        sessions, outputs = zip(*(key.rsplit("_", 1) for key in keys), strict=True)
        by_output = sorted(range(len(keys)), key=lambda row: int(outputs[row]))
        super().__init__(data, _infos(keys, "train"), sessions, {sessions[row]: row for row in by_output}.values())

    def _write(self, told: Mapping[int, Told]) -> Mapping[int, int]:
        keys = [self._keys[row] for row in told]
        column = _queue().kv_batch_get(keys=keys, partition_id="train", select_fields=[_SCORES])[_SCORES]
        # All other tokens have zeros.
        scores: Any = [row * 0.0 for row in column]
        for row, each in zip(scores, told.values(), strict=True):
            row[-1] = each["reward_score"]
        lengths = map(len, scores)
        if getattr(column, "is_nested", False):
            import torch

            scores = torch.nested.as_nested_tensor(scores, layout=torch.jagged)
        _put(keys, "train", _SCORES, scores)
        _put_infos(keys, "train", [self.infos[row] for row in told])
        return {row: length - 1 for row, length in zip(told, lengths, strict=True)}


def put_extra_info(score: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `_compute_reward_colocate`, which puts each key of the extra info into a field of its own. Put it where it
    is for all other rows: there verl's validation and `QueuedRows` look for it.
    """
    batch = score(self, *args, **kwargs)
    output = self.reward_loop_manager.qreward_output
    names = output.meta_info["reward_extra_keys"]
    rows = zip(*(output.non_tensor_batch[name].tolist() for name in names), strict=True)
    _put_infos(batch.keys, batch.partition_id, [dict(zip(names, row, strict=True)) for row in rows])
    return batch


def filter_scored_rows(
    has_none: Callable[[Mapping[str, Any]], bool], classify: Callable[..., Any], self: Any, partition_id: str
) -> Any:
    """Wraps `_dapo_filtered_keys`: verl classifies a group by the rows that have a number to train on. A group without
    any is kept: while a judge is down, it would be replaced for ever. `has_none` tells a row by its extra info.
    """
    rewards, rows = self._dapo_classification_cache[partition_id], self.partitions[partition_id]
    known = set(rewards)
    found = classify(self, partition_id)
    new = rewards.keys() - known
    keys = [key for key in rows if key.split("_")[0] in new]
    out = {key for key, info in zip(keys, _infos(keys, partition_id) if keys else (), strict=True) if has_none(info)}
    if not out:
        return found
    scored = {key.split("_")[0] for key in keys if key not in out}
    for uid in {key.split("_")[0] for key in out}:
        if uid in scored:
            del rewards[uid]  # verl classifies it again
        else:
            rewards[uid] = None
    self.partitions[partition_id] = {key: row for key, row in rows.items() if key not in out}
    try:
        return classify(self, partition_id)
    finally:
        self.partitions[partition_id] = rows


def _infos(keys: Sequence[str], partition_id: str) -> list[Mapping[str, Any]]:
    """The extra info of rows in the queue; empty for one that an agent loop has rewarded itself."""
    return [fields.get(_INFO) or {} for fields in _extra_fields(keys, partition_id)]


def _put_infos(keys: Sequence[str], partition_id: str, infos: Sequence[Mapping[str, Any]]) -> None:
    column = np.empty(len(infos), dtype=object)
    column[:] = [{**each, _INFO: info} for each, info in zip(_extra_fields(keys, partition_id), infos, strict=True)]
    _put(keys, partition_id, _FIELD, column)


def _extra_fields(keys: Sequence[str], partition_id: str) -> list[Mapping[str, Any]]:
    column = _queue().kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=[_FIELD])[_FIELD]
    rows = column.tolist() if hasattr(column, "tolist") else list(column)
    return [getattr(row, "data", row) or {} for row in rows]


def _put(keys: Sequence[str], partition_id: str, field: str, column: Any) -> None:
    table = import_module("verl.utils.tensordict_utils").get_tensordict({field: column})
    _queue().kv_batch_put(keys=list(keys), partition_id=partition_id, fields=table)


def _queue() -> Any:
    return import_module("transfer_queue")
