"""verl's V1 trainer (trainer/ppo/v1): it submits prompts, and a queue returns their trajectories.

Only the synchronous mode is played: the asynchronous ones reward the same way, and differ in what the policy is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..tensors import objects, padded
from .agent_loop import QueuedAgentLoops, batch_of
from .data import TensorColumns, VerlDataProto
from .replay_buffer import MODULE as REPLAY_BUFFER
from .replay_buffer import ReplayBuffer, TransferQueue
from .results import VerlStep
from .trainers import Setup, TrainerBase, Validated

MODULE = "verl.trainer.ppo.v1.trainer_base"

Rows = Mapping[str, dict[str, Any]]
"""Trajectories by their keys in the queue."""


class SampledKeys(NamedTuple):
    """`KVBatchMeta`: the keys of trajectories in the queue."""

    keys: Sequence[str]
    partition_id: str


class V1Trainer(TrainerBase):
    """`PPOTrainer`, synchronous."""

    module = MODULE

    def __init__(self, config: Any, setup: Setup, queue: TransferQueue) -> None:
        self._mode, self.queue = str(config.trainer.v1.trainer_mode), queue
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
        self.sessions.dropped, self.replay_buffer.evicted = [], []
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
            dropped=self.sessions.dropped,
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
        self.sessions = QueuedAgentLoops(self.config, self.loops.worker, self.queue)

    def _submit(self, count: int) -> None:
        """Begin at least `count` prompts of the training, in whole batches of the data loader; on the event loop."""
        while count > 0:
            prompts = self._prompts(self._next_columns())
            self.sessions.submit(prompts, "train")
            count -= len(prompts)

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
                self.sessions.submit(prompts, "val")
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
        data = VerlDataProto(TensorColumns(tensors, len(listed)), {"uid": objects(str(row["uid"]) for row in listed)})
        data = self._advance(data, "compute_advantage_for_multi_trajectories", batch_keys=list(rows))
        turns = np.array([row["num_turns"] for row in listed])
        return VerlDataProto(whole, {"__num_turns__": turns}).union(data)


def _info(row: Mapping[str, Any]) -> dict[str, Any]:
    return dict(row["extra_fields"].get("reward_extra_info") or {})
