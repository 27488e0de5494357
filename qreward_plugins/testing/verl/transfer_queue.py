"""verl's queue of trajectories, and the replay buffer that samples groups of them (trainer/ppo/v1/replay_buffer.py)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..tensors import objects

MODULE = "verl.trainer.ppo.v1.replay_buffer"
FILTERED_COUNTS = "_dapo_filtered_reward_counts"


@dataclass
class Prompt:
    """A group: `status` is running, finished or failure; `rows` are its trajectories by key."""

    uid: str
    global_steps: int
    status: str = "running"
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: list[tuple[int, BaseException]] = field(default_factory=list)


class SampledKeys(NamedTuple):
    """`KVBatchMeta`: the keys of trajectories in the queue."""

    keys: Sequence[str]
    partition_id: str


class TransferQueue:
    """Prompts by partition ("train", "val"). `changed` is notified on the event loop whenever a prompt ends."""

    def __init__(self) -> None:
        self.partitions: dict[str, dict[str, Prompt]] = {"train": {}, "val": {}}
        self.taken: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "val": {}}
        self.changed = asyncio.Event()

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> dict[str, Any]:
        """Columns of trajectories; a field that none of them has is not there."""
        waiting = {key: row for prompt in self.partitions[partition_id].values() for key, row in prompt.rows.items()}
        rows = [(waiting | self.taken[partition_id])[key] for key in keys]
        names = [name for name in select_fields if any(name in row for row in rows)]
        return {name: objects(row.get(name) for row in rows) for name in names}

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Mapping[str, Sequence[Any]]) -> None:
        """Set columns of trajectories that were sampled."""
        for place, key in enumerate(keys):
            self.taken[partition_id][key] |= {name: values[place] for name, values in fields.items()}


class ReplayBuffer:
    """Samples groups for a synchronous step: those that failed with what is left of them, unless `refill_failed`. With
    a `metric` it replaces groups that have one value of it in all trajectories (DAPO).
    """

    def __init__(
        self,
        queue: TransferQueue,
        *,
        metric: str | None,
        refill: Callable[[int], None],
        refill_failed: bool,
        max_inflight: int,
    ) -> None:
        if metric is not None and max_inflight <= 0:
            raise ValueError("max_inflight_gen_batches must be a positive integer")
        self.evicted: list[str] = []
        self._dapo_classification_cache: dict[str, dict[str, float | None]] = {"train": {}, "val": {}}
        self._queue = queue
        self.filter_groups_metric = metric
        self._refill = refill
        self._refill_failed = refill_failed
        self._max_inflight = max_inflight

    @property
    def partitions(self) -> dict[str, list[str]]:
        """The keys of the trajectories that wait, by partition."""
        return {
            name: [key for prompt in prompts.values() for key in prompt.rows]
            for name, prompts in self._queue.partitions.items()
        }

    async def sample(self, partition: str, size: int) -> tuple[list[Prompt], dict[str, Any]]:
        """Wait for enough groups, replacing those that do not count. Raises `RuntimeError` where a group lacks the
        metric of the filter, and where nothing is left of all groups.
        """
        metrics: dict[str, Any] = {}
        training = partition == "train"
        filters = training and self.filter_groups_metric is not None
        credit, draining = 0, False
        while True:
            self._queue.changed.clear()
            prompts = self._queue.partitions[partition]
            failed = self._without_rows(prompts) if training and self._refill_failed else set()
            filtered, counts = self._dapo_filtered_keys(partition)
            self._evict(prompts, {"filter_groups": filtered, "rollout_failure": failed}, metrics)
            if counts:
                metrics[FILTERED_COUNTS] = dict(Counter(metrics.get(FILTERED_COUNTS, {})) + counts)
            usable = [prompt for prompt in prompts.values() if prompt.status != "running"]
            inflight = len(prompts) - len(usable)
            enough = len(usable) >= size
            if failed and not filters and not enough:
                self._refill(len(failed))
                continue
            if filters:
                draining = draining or enough
                credit = 0 if draining else credit + 2 * len(filtered) + len(failed)
                count = min(credit, max(0, self._max_inflight - inflight))
                if count > 0:
                    self._refill(count)
                    credit -= count
                    continue
            if enough and not (filters and inflight):
                chosen = self._take(usable, prompts, partition, size)
                if filters and prompts:
                    metrics["training/filter_groups/discarded_surplus_samples"] = len(prompts)
                    prompts.clear()
                if training and not any(prompt.rows for prompt in chosen):
                    raise RuntimeError(_NOTHING + ("" if self._refill_failed else _ENABLE))
                return chosen, metrics
            await self._queue.changed.wait()

    @staticmethod
    def _without_rows(prompts: Mapping[str, Prompt]) -> set[str]:
        return {each.uid for each in prompts.values() if each.status == "failure" and not each.rows}

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        """Groups whose samples have one value of the metric, and how many have which; under verl's name for it."""
        if partition_id == "val" or self.filter_groups_metric is None:
            return set(), Counter()
        prompts = self._queue.partitions[partition_id].values()
        finished = {prompt.uid: prompt for prompt in prompts if prompt.status == "finished"}
        known = self._dapo_classification_cache[partition_id]
        for uid in known.keys() - finished.keys():
            del known[uid]
        known |= self._classified([prompt for uid, prompt in finished.items() if uid not in known])
        filtered = {uid: reward for uid, reward in known.items() if reward is not None}
        return set(filtered), Counter(filtered.values())

    def _classified(self, prompts: Sequence[Prompt]) -> dict[str, float | None]:
        """By group the value that all its samples have, or None."""
        lacking: set[str] = set()
        found: dict[str, float | None] = {}
        for prompt in prompts:
            values = []
            for row in prompt.rows.values():
                info = row["extra_fields"].get("reward_extra_info", {})
                if self.filter_groups_metric == "reward":
                    values.append(float(np.asarray(row["rm_scores"]).sum()))
                elif self.filter_groups_metric in info:
                    values.append(float(info[self.filter_groups_metric]))
                else:
                    lacking.add(prompt.uid)
            if not prompt.rows:
                lacking.add(prompt.uid)
            is_flat = len(values) > 1 and float(np.std(values)) == 0.0
            found[prompt.uid] = float(values[0]) if is_flat else None
        if lacking:
            raise RuntimeError(
                f"Finished groups are missing DAPO metric {self.filter_groups_metric!r}: {sorted(lacking)[:5]}"
            )
        return found

    def _evict(self, prompts: dict[str, Prompt], why: Mapping[str, set[str]], metrics: dict[str, Any]) -> None:
        for name, uids in why.items():
            if uids:
                key = f"training/{name}/evicted_samples"
                metrics[key] = metrics.get(key, 0) + len(uids)
        for uid in set().union(*why.values()):
            self.evicted.append(uid)
            del prompts[uid]

    def _take(self, usable: Sequence[Prompt], prompts: dict[str, Prompt], partition: str, size: int) -> list[Prompt]:
        chosen = sorted(usable, key=lambda prompt: prompt.global_steps)[:size]
        for prompt in chosen:
            del prompts[prompt.uid]
            # verl has them in the order of their coming, which is by chance.
            prompt.rows = dict(sorted(prompt.rows.items(), key=_place))
            self._queue.taken[partition].update(prompt.rows)
        return chosen


def _place(row: tuple[str, Any]) -> tuple[int, ...]:
    return tuple(int(number) for number in row[0].rsplit("_", 2)[1:])


_NOTHING = "Sync replay buffer selected terminal groups with no materializable trajectories."
_ENABLE = " Enable trainer.v1.sampler.sync_refill_failed_groups to replace failed groups."
