"""verl's V1 trainer (trainer/ppo/v1): it submits prompts, whose sessions put their trajectories into a queue.

A replay buffer samples groups of them.

Only the synchronous mode is played: the asynchronous ones reward the same way, and differ in what the policy is.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..data_proto import VerlColumns, VerlDataProto, as_float32, objects, padded
from .agent_loop import batch_of, fields_of
from .generation import AgentOutput
from .trainers import Setup, TrainerBase, Validated, VerlStep

MODULE = "verl.trainer.ppo.v1.trainer_base"
REPLAY_BUFFER = "verl.trainer.ppo.v1.replay_buffer"

Rows = Mapping[str, dict[str, Any]]
"""Trajectories by their keys in the queue."""

_NOTHING = "Sync replay buffer selected terminal groups with no materializable trajectories."
_log = logging.getLogger("verl.trainer.ppo.v1")


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


class SampledKeys(NamedTuple):
    """`KVBatchMeta`: the keys of trajectories in the queue."""

    keys: Sequence[str]
    partition_id: str


class V1Trainer(TrainerBase):
    """`PPOTrainer`, synchronous."""

    module = MODULE

    def __init__(self, config: Any, setup: Setup, queue: TransferQueue) -> None:
        self._mode, self.queue = str(config.trainer.v1.trainer_mode), queue
        self.dropped: list[tuple[str, int, BaseException]] = []
        """Uid, session and error of the sessions that failed in a step."""
        self._tasks: set[asyncio.Task[None]] = set()
        filters = config.algorithm.filter_groups
        if filters.enable and not filters.metric:
            raise ValueError("algorithm.filter_groups.metric must be set when group filtering is enabled")
        if filters.enable:
            config.data.gen_batch_size = 1
        super().__init__(config, setup)
        metric = str(filters.metric) if filters.enable else None
        make: type[ReplayBuffer] = sys.modules[REPLAY_BUFFER].ReplayBuffer
        self.replay_buffer = make(queue, metric=metric, refill=self._submit)

    def step(self) -> VerlStep:
        """One step of the training loop."""
        self.global_steps += 1
        self.dropped, self.replay_buffer.evicted = [], []
        size = int(self.config.data.train_batch_size)

        async def sampled() -> tuple[Rows, dict[str, Any]]:
            self._submit(size)
            return await self.replay_buffer.sample("train", size)

        found, metrics = self.setup.run(sampled())
        self.checkpoint_manager.sleep_replicas()
        if self.is_colocated:
            self._compute_reward_colocate(SampledKeys(list(found), "train"))
        batch = self._advanced(found)
        self.checkpoint_manager.update_weights(self.global_steps)
        step = self._step_of(
            batch,
            [_info(row) for row in found.values()],
            metrics,
            sessions=[row["session_id"] for row in found.values()],
            dropped=self.dropped,
            evicted=self.replay_buffer.evicted,
        )
        self.queue.rows["train"].clear()
        return step

    def _start_loops(self, reward_workers: Any) -> None:
        refills = self.config.trainer.v1.sampler.sync_refill_failed_groups
        if self._mode != "sync" or refills:
            what = "sampler.sync_refill_failed_groups=True" if refills else f"trainer_mode={self._mode}"
            raise NotImplementedError(f"trainer.v1.{what} is not played by FakeVerlTrainer; it plays sync")
        super()._start_loops(reward_workers)

    def _submit(self, count: int) -> None:
        """Begin at least `count` prompts of the training, in whole batches of the data loader; on the event loop."""
        while count > 0:
            prompts = self._prompts(self._next_columns())
            self._begin(prompts, "train")
            count -= len(prompts)

    def _begin(self, prompts: Sequence[dict[str, Any]], partition: str) -> None:
        """Begin these prompts, which have their uid and the step that they are of; on the event loop."""
        for columns in prompts:
            self.queue.status[partition][columns["uid"]] = "running"
            task = asyncio.ensure_future(self._run_prompt(columns, partition))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_prompt(self, columns: dict[str, Any], partition: str) -> None:
        rollout, uid = self.config.actor_rollout_ref.rollout, columns["uid"]
        count = int(columns.pop("__rollout_n__", rollout.val_kwargs.n if partition == "val" else rollout.n))
        sessions = (self._run_session({**columns, "session_id": number}, partition) for number in range(count))
        results = await asyncio.gather(*sessions, return_exceptions=True)
        errors = [(number, error) for number, error in enumerate(results) if isinstance(error, BaseException)]
        for number, error in errors:
            _log.error("Error in _run_prompt for uid=%s: %r", uid, error)
            if partition == "train":
                self.dropped.append((uid, number, error))
        self.queue.status[partition][uid] = "failure" if errors else "finished"
        self.queue.changed.set()

    async def _run_session(self, columns: dict[str, Any], partition: str) -> None:
        step, session = columns["global_steps"], columns["session_id"]
        outputs = await self.loops.worker.run(columns, session, validate=partition == "val", global_step=step)
        rows = []
        for output in outputs:
            output.reward_score = outputs[-1].reward_score
            if (info := outputs[-1].extra_fields.get("reward_extra_info")) is not None:
                output.extra_fields["reward_extra_info"] = info
            rows.append({**_queue_fields(output), **columns})
        for number, row in enumerate(rows):
            self.queue.rows[partition][f"{columns['uid']}_{session}_{number}"] = row

    def _prompts(self, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        count = len(columns["uid"])
        rows = [{name: values[row] for name, values in columns.items()} for row in range(count)]
        return [{**row, "global_steps": self.global_steps} for row in rows]

    def _validate(self) -> dict[str, Any]:
        validated: list[Validated] = []
        expected: dict[tuple[str, str], int] = {}
        count = int(self.config.actor_rollout_ref.rollout.val_kwargs.n)
        for columns in self.val_dataloader:
            prompts = self._prompts(self._with_uids(columns))
            for each in prompts:
                expected[str(each["data_source"]), each["uid"]] = int(each.get("__rollout_n__", count))

            async def sampled(prompts: list[dict[str, Any]] = prompts) -> Rows:
                self._begin(prompts, "val")
                return (await self.replay_buffer.sample("val", len(prompts)))[0]

            rows = self.setup.run(sampled())
            if self.is_colocated:
                self._apart(partial(self._compute_reward_colocate, SampledKeys(list(rows), "val")))
            # Of several outputs of a session the last one counts.
            for row in {key.rsplit("_", 1)[0]: row for key, row in rows.items()}.values():
                text = str(self.tokenizer.decode(row["responses"], skip_special_tokens=True))
                score = float(np.asarray(row["rm_scores"]).sum())
                validated.append(Validated(row["uid"], row["data_source"], text, score, row["num_turns"], _info(row)))
            self.queue.rows["val"].clear()
        return self._means(validated, expected_acc_counts=expected)

    def _compute_reward_colocate(self, batch: SampledKeys, metrics: Any = None) -> SampledKeys:
        """Score a whole batch by a colocated reward model: a manager learns the prompts and nothing else."""
        rows = [self.queue.rows[batch.partition_id][key] for key in batch.keys]
        columns = {"raw_prompt": objects(row["raw_prompt"] for row in rows)}
        output = self.reward_loop_manager.compute_rm_score(VerlDataProto(batch_of(rows), columns))
        for place, row in enumerate(rows):
            row["rm_scores"] = np.asarray(output.batch["rm_scores"])[place][: len(row["responses"])]
            row |= {name: output.non_tensor_batch[name][place] for name in output.meta_info["reward_extra_keys"]}
        return batch

    def _advanced(self, rows: Rows) -> VerlDataProto:
        """The batch with its advantages. Of all columns, estimators get only `uid`."""
        listed = list(rows.values())
        whole = batch_of(listed)
        if not all("rm_scores" in row for row in listed):
            raise KeyError('key "rm_scores" not found in TensorDict')
        tensors = {name: whole[name] for name in ("responses", "response_mask")}
        tensors["rm_scores"] = padded([row["rm_scores"] for row in listed], dtype=np.float32)
        data = VerlDataProto(VerlColumns(tensors, len(listed)), {"uid": objects(str(row["uid"]) for row in listed)})
        data = self._advance(data, "compute_advantage_for_multi_trajectories", batch_keys=list(rows))
        turns = np.array([row["num_turns"] for row in listed])
        return VerlDataProto(whole, {"__num_turns__": turns}).union(data)


def _info(row: Mapping[str, Any]) -> dict[str, Any]:
    return dict(row["extra_fields"].get("reward_extra_info") or {})


def _queue_fields(output: AgentOutput) -> dict[str, Any]:
    """An output in the queue: its score stands at its last token, and there must be one."""
    fields = fields_of(output)
    if output.reward_score is not None:
        fields["rm_scores"] = np.zeros(len(output.response_mask), dtype=np.float32)
        fields["rm_scores"][-1] = as_float32(output.reward_score)
    return fields
