"""verl's queue of trajectories, and the replay buffer that samples groups of them (trainer/ppo/v1/replay_buffer.py)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..tensors import objects

MODULE = "verl.trainer.ppo.v1.replay_buffer"


class TransferQueue:
    """By partition ("train", "val"): `status`, the prompts by uid (running, finished or failure), and `rows`, their
    trajectories by key (uid, session and number of the output). `changed` is notified whenever a prompt ends.
    """

    def __init__(self) -> None:
        self.status: dict[str, dict[str, str]] = {"train": {}, "val": {}}
        self.rows: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "val": {}}
        self.changed = asyncio.Event()

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> dict[str, Any]:
        """Columns of trajectories; a field that none of them has is not there."""
        rows = [self.rows[partition_id][key] for key in keys]
        names = [name for name in select_fields if any(name in row for row in rows)]
        return {name: objects(row.get(name) for row in rows) for name in names}

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Mapping[str, Sequence[Any]]) -> None:
        """Set columns of trajectories."""
        for place, key in enumerate(keys):
            self.rows[partition_id][key] |= {name: values[place] for name, values in fields.items()}

    def of_group(self, partition: str, uid: str) -> dict[str, dict[str, Any]]:
        """The trajectories of a prompt, in the order of its sessions. verl has them in that of their coming."""
        rows = self.rows[partition].items()
        return dict(sorted((each for each in rows if each[0].startswith(f"{uid}_")), key=_place))


class ReplayBuffer:
    """Samples groups for a synchronous step: those that failed with what is left of them. With a `metric` it replaces
    groups that have one value of it in all trajectories (DAPO). A replacement starts when all groups have ended; verl
    starts some ahead, and drops those that are left over.
    """

    def __init__(self, queue: TransferQueue, *, metric: str | None, refill: Callable[[int], None]) -> None:
        self.evicted: list[str] = []
        self.filter_groups_metric = metric
        self.partitions = queue.rows
        self._dapo_classification_cache: dict[str, dict[str, float | None]] = {"train": {}, "val": {}}
        self._queue, self._refill = queue, refill

    async def sample(self, partition: str, size: int) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Wait for enough groups, replacing those that do not count; return their trajectories, and metrics. Raises
        `RuntimeError` where a group lacks the metric of the filter, and where nothing is left of all groups.
        """
        status, metrics = self._queue.status[partition], Counter[str]()
        while True:
            while "running" in status.values():
                self._queue.changed.clear()
                await self._queue.changed.wait()
            filtered, _ = self._dapo_filtered_keys(partition)
            for uid in filtered:
                metrics["training/filter_groups/evicted_samples"] += 1
                self.evicted.append(uid)
                for key in self._queue.of_group(partition, uid):
                    del self._queue.rows[partition][key]
                del status[uid]
            if len(status) >= size:
                break
            self._refill(size - len(status))
        chosen = {key: row for uid in status for key, row in self._queue.of_group(partition, uid).items()}
        status.clear()
        if partition == "train" and not chosen:
            raise RuntimeError(_NOTHING)
        return chosen, dict(metrics)

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        """Groups whose samples have one value of the metric, and how many have which; under verl's name for it."""
        if partition_id == "val" or self.filter_groups_metric is None:
            return set(), Counter()
        status = self._queue.status[partition_id]
        finished = [uid for uid, state in status.items() if state == "finished"]
        known = self._dapo_classification_cache[partition_id]
        for uid in known.keys() - status.keys():
            del known[uid]
        for uid in finished:
            if uid not in known:
                known[uid] = self._shared(self._queue.of_group(partition_id, uid))
        filtered = {uid: value for uid, value in known.items() if value is not None}
        return set(filtered), Counter(filtered.values())

    def _shared(self, rows: Mapping[str, Mapping[str, Any]]) -> float | None:
        """The value of the metric that all trajectories of a group have, or None."""
        metric, values = self.filter_groups_metric, []
        for row in rows.values():
            info = row["extra_fields"].get("reward_extra_info", {})
            if metric != "reward" and metric not in info:
                raise RuntimeError(f"Finished groups are missing DAPO metric {metric!r}: {[*rows]}")
            values.append(float(np.asarray(row["rm_scores"]).sum() if metric == "reward" else info[metric]))
        return values[0] if len(values) > 1 and float(np.std(values)) == 0.0 else None


def _place(row: tuple[str, Any]) -> tuple[int, ...]:
    return tuple(int(number) for number in row[0].rsplit("_", 2)[1:])


_NOTHING = "Sync replay buffer selected terminal groups with no materializable trajectories."
