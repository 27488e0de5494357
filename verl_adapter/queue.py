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


def extra_info(keys: Sequence[str], partition_id: str) -> list[Mapping[str, Any]]:
    """The extra info of these rows; empty for one that an agent loop has rewarded itself."""
    return [fields.get(_INFO) or {} for fields in _extra_fields(keys, partition_id)]


def with_extra_info(score: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_compute_reward_colocate`, which puts each key of the extra info into a field of its own. Put it where it
    is for all other rows: there verl's validation and `extra_info` look for it.
    """

    @functools.wraps(score)
    def scored(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch = score(self, batch, *args, **kwargs)
        infos = self.reward_loop_manager.qreward_infos
        column = np.empty(len(infos), dtype=object)
        fields = _extra_fields(batch.keys, batch.partition_id)
        column[:] = [{**each, _INFO: info} for each, info in zip(fields, infos, strict=True)]
        table = importlib.import_module("verl.utils.tensordict_utils").get_tensordict({_FIELD: column})
        _queue().kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=table)
        return batch

    return scored


def noting_infos(score: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `compute_rm_score`, and keep the extra info of its rows for `with_extra_info`."""

    @functools.wraps(score)
    def scored(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        output = score(self, data, *args, **kwargs)
        columns = {name: output.non_tensor_batch[name].tolist() for name in output.meta_info["reward_extra_keys"]}
        self.qreward_infos = [{name: values[row] for name, values in columns.items()} for row in range(len(data))]
        return output

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


def _extra_fields(keys: Sequence[str], partition_id: str) -> list[Mapping[str, Any]]:
    column = _queue().kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=[_FIELD])[_FIELD]
    rows = column.tolist() if hasattr(column, "tolist") else list(column)
    return [getattr(row, "data", row) or {} for row in rows]


def _queue() -> Any:
    return importlib.import_module("transfer_queue")
