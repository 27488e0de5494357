"""The transfer queue of verl's V1 trainer, in which trajectories wait with their extra info."""

from __future__ import annotations

import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .rewards import MISSING

_FIELD = "extra_fields"
_INFO = "reward_extra_info"
_SCORES = "rm_scores"


def extra_info(keys: Sequence[str], partition_id: str) -> list[Mapping[str, Any]]:
    """The extra info of these rows; empty for one that an agent loop has rewarded itself."""
    return [fields.get(_INFO) or {} for fields in _extra_fields(keys, partition_id)]


def put_rewards(rows: Mapping[str, Mapping[str, Any]], partition_id: str) -> Mapping[str, int]:
    """Write what `run_single` would have returned for rows, by their keys: rewards at the last tokens of responses,
    from where the trainer's metrics read them, and extra info. Return the lengths of the responses in tokens.
    """
    keys = list(rows)
    column = _queue().kv_batch_get(keys=keys, partition_id=partition_id, select_fields=[_SCORES])[_SCORES]
    # All other tokens have zeros.
    scores: Any = [row * 0.0 for row in column]
    lengths = {key: len(row) for key, row in zip(keys, scores, strict=True)}
    for key, row in zip(keys, scores, strict=True):
        row[-1] = rows[key]["reward_score"]
    if getattr(column, "is_nested", False):
        import torch

        scores = torch.nested.as_nested_tensor(scores, layout=torch.jagged)
    _queue().kv_batch_put(keys=keys, partition_id=partition_id, fields=_table({_SCORES: scores}))
    _put_infos(keys, partition_id, [row["reward_extra_info"] for row in rows.values()])
    return lengths


def with_extra_info(score: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_compute_reward_colocate`, which puts each key of the extra info into a field of its own. Put it where it
    is for all other rows: there verl's validation and `extra_info` look for it.
    """

    @functools.wraps(score)
    def scored(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch = score(self, batch, *args, **kwargs)
        output = self.reward_loop_manager.qreward_output
        names = output.meta_info["reward_extra_keys"]
        rows = zip(*(output.non_tensor_batch[name].tolist() for name in names), strict=True)
        _put_infos(batch.keys, batch.partition_id, [dict(zip(names, row, strict=True)) for row in rows])
        return batch

    return scored


def of_scored_rows(classify: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_dapo_filtered_keys`: a group is replaced if its scored rows are of one reward. A group without any is
    kept: while a judge is down, it would be replaced for ever.
    """

    @functools.wraps(classify)
    def filtered_keys(self: Any, partition_id: str) -> Any:
        known = set(self._dapo_classification_cache[partition_id])
        classify(self, partition_id)
        rewards = self._dapo_classification_cache[partition_id]
        new = rewards.keys() - known
        keys = [key for key in self.partitions[partition_id] if key.split("_")[0] in new]
        by_uid: dict[str, list[Mapping[str, Any]]] = {}
        for key, info in zip(keys, extra_info(keys, partition_id) if keys else (), strict=True):
            by_uid.setdefault(key.split("_")[0], []).append(info)
        for uid, infos in by_uid.items():
            if any(info.get(MISSING) for info in infos):
                rewards[uid] = _shared([float(info[self.filter_groups_metric]) for info in infos if not info[MISSING]])
        flat = {uid: reward for uid, reward in rewards.items() if reward is not None}
        return set(flat), Counter(flat.values())

    return filtered_keys


def _shared(values: Sequence[float]) -> float | None:
    """The value that all have, as verl compares them; None if they differ, or are fewer than two."""
    return values[0] if len(values) > 1 and math.isfinite(values[0]) and len(set(values)) == 1 else None


def _put_infos(keys: Sequence[str], partition_id: str, infos: Sequence[Mapping[str, Any]]) -> None:
    column = np.empty(len(infos), dtype=object)
    column[:] = [{**each, _INFO: info} for each, info in zip(_extra_fields(keys, partition_id), infos, strict=True)]
    _queue().kv_batch_put(keys=keys, partition_id=partition_id, fields=_table({_FIELD: column}))


def _extra_fields(keys: Sequence[str], partition_id: str) -> list[Mapping[str, Any]]:
    column = _queue().kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=[_FIELD])[_FIELD]
    rows = column.tolist() if hasattr(column, "tolist") else list(column)
    return [getattr(row, "data", row) or {} for row in rows]


def _table(columns: Mapping[str, Any]) -> Any:
    return importlib.import_module("verl.utils.tensordict_utils").get_tensordict(dict(columns))


def _queue() -> Any:
    return importlib.import_module("transfer_queue")
