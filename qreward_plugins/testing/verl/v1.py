"""verl's V1 trainer (trainer/ppo/v1): it submits prompts, and a queue returns their trajectories.

Only the synchronous mode is played: the asynchronous ones reward the same way, and differ in what the policy is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .agent_loop import AgentLoopWorker, QueuedAgentLoops
from .base import Setup, TrainerBase
from .metrics import named
from .protocol import VerlDataProto
from .results import VerlStep
from .trajectories import add_infos, padding_row, rewards_batch, training_batch
from .transfer_queue import FILTERED_COUNTS, Prompt, ReplayBuffer, SampledKeys, TransferQueue
from .transfer_queue import MODULE as REPLAY_BUFFER

MODULE = "verl.trainer.ppo.v1.trainer_base"


class V1Trainer(TrainerBase):
    """`PPOTrainer`, synchronous."""

    agent_loops: QueuedAgentLoops

    def __init__(self, config: Any, setup: Setup, queue: TransferQueue) -> None:
        self.trainer_mode = str(config.trainer.v1.trainer_mode)
        if self.trainer_mode not in ("sync", "colocate_async", "separate_async"):
            raise ValueError(f"Unknown trainer: {self.trainer_mode}")
        self.queue = queue
        self.replay_buffer = self._make_buffer(config)
        super().__init__(config, setup)

    def _make_agent_loops(self, worker: AgentLoopWorker) -> QueuedAgentLoops:
        if self.trainer_mode != "sync":
            raise NotImplementedError(
                f"trainer.v1.trainer_mode={self.trainer_mode} is not played by FakeVerlTrainer; it plays sync"
            )
        return QueuedAgentLoops(self.config, self.setup.engine, worker, self.queue)

    def step(self) -> VerlStep:
        """One step of the training loop."""
        self.global_steps += 1
        self.agent_loops.dropped, self.replay_buffer.evicted = [], []
        calls = self.agent_loops.reward_calls
        size = int(self.config.data.train_batch_size)
        self.setup.run(self._submit(size))
        batch, keys, metrics = self._step_once(size)
        self.checkpoint_manager.update_weights(self.global_steps)
        counts = metrics.pop(FILTERED_COUNTS, None)
        logged = self._log({**metrics, **self._metrics(batch)})
        if counts:
            logged[FILTERED_COUNTS] = counts
        rows = [self.queue.taken["train"][key] for key in keys]
        step = VerlStep(
            global_step=self.global_steps,
            batch=batch,
            responses=[self._text(row["responses"]) for row in rows],
            uids=[key.rsplit("_", 2)[0] for key in keys],
            sessions=[int(key.rsplit("_", 2)[1]) for key in keys],
            extra_info=[dict(row["extra_fields"].get("reward_extra_info", {})) for row in rows],
            metrics=logged,
            reward_calls=self.agent_loops.reward_calls - calls,
            dropped=self.agent_loops.dropped,
            evicted=self.replay_buffer.evicted,
            padding=[bool(row.get("is_padding")) for row in rows],
        )
        self.queue.taken["train"].clear()
        return step

    def _validate(self) -> dict[str, Any]:
        texts: list[str] = []
        scores: list[float] = []
        uids: list[str] = []
        turns: list[int] = []
        sources: list[str] = []
        infos: dict[str, list[Any]] = {"reward": []}
        expected: dict[tuple[str, str], int] = {}
        count = int(self.config.actor_rollout_ref.rollout.val_kwargs.n)
        for columns in self.val_dataloader:
            prompts = self._prompts(columns)
            expected |= {
                (str(each["data_source"]), each["uid"]): int(each.get("__rollout_n__", count)) for each in prompts
            }
            sampled = self.setup.run(self._generate_and_sample(prompts))
            keys = [key for prompt in sampled for key in prompt.rows]
            self._reward_batch_apart("val", keys)
            # Of several outputs of a session the last one counts.
            last = {key.rsplit("_", 1)[0]: key for key in keys}
            rows = [self.queue.taken["val"][key] for key in last.values()]
            if rows and not all("rm_scores" in row for row in rows):
                raise KeyError('key "rm_scores" not found in TensorDict')
            batch_scores = [float(np.asarray(row["rm_scores"]).sum()) for row in rows]
            uids += [str(row["uid"]) for row in rows]
            texts += [self._text(row["responses"]) for row in rows]
            scores += batch_scores
            turns += [row["num_turns"] for row in rows]
            sources += [row["data_source"] for row in rows]
            add_infos(infos, batch_scores, [row["extra_fields"].get("reward_extra_info", {}) for row in rows])
            self.queue.taken["val"].clear()
        self._seen = {"responses": texts, "scores": scores, "uids": uids, "extra_info": infos}
        return self._val_metrics_update(sources, uids, infos, turns, expected_acc_counts=expected)

    def _val_metrics_update(
        self,
        data_sources: Sequence[str],
        sample_uids: Sequence[str],
        reward_extra_infos_dict: Mapping[str, Sequence[Any]],
        sample_turns: Sequence[Any],
        expected_acc_counts: Mapping[tuple[str, str], int] | None = None,
    ) -> dict[str, Any]:
        process = sys.modules[MODULE].process_validation_metrics
        found = process(data_sources, sample_uids, reward_extra_infos_dict, expected_acc_counts=expected_acc_counts)
        return named(found, sample_turns)

    async def _generate_and_sample(self, prompts: Sequence[dict[str, Any]]) -> list[Prompt]:
        self.agent_loops.submit(prompts, "val")
        return (await self.replay_buffer.sample("val", len(prompts)))[0]

    async def _submit(self, count: int) -> None:
        self._add_prompts(count)

    def _add_prompts(self, count: int) -> None:
        """Submit exactly `count` prompts. Raises `ValueError` if they are no whole batches of the data loader."""
        size = self.config.data.get("gen_batch_size", None) or self.config.data.train_batch_size
        if count <= 0 or count % size:
            raise ValueError(
                f"num_prompts ({count}) must be a positive multiple of gen_batch_size "
                f"({size}); it is submitted in whole gen_batch_size dataloader fetches."
            )
        chunks = [self._prompts(self._next_columns()) for _ in range(count // size)]
        self.agent_loops.submit([prompt for chunk in chunks for prompt in chunk], "train")

    def _prompts(self, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        count = len(columns["raw_prompt"])
        return [
            {
                **{name: values[row] for name, values in columns.items()},
                "uid": self._new_uid(),
                "global_steps": self.global_steps,
            }
            for row in range(count)
        ]

    def _step_once(self, size: int) -> tuple[VerlDataProto, list[str], dict[str, Any]]:
        prompts, metrics = self.setup.run(self.replay_buffer.sample("train", size))
        self.checkpoint_manager.sleep_replicas()
        keys = [key for prompt in prompts for key in prompt.rows]
        self._reward_batch("train", keys)
        keys += self._pad(keys)
        rows = [self.queue.taken["train"][key] for key in keys]
        # Looked up by its name in verl, because hooks may have wrapped it there. Estimators get only the column `uid`.
        compute = sys.modules[MODULE].compute_advantage_for_multi_trajectories
        data = self._advance(training_batch(rows), compute, batch_keys=keys)
        data.non_tensor_batch |= {
            "__num_turns__": np.array([row["num_turns"] for row in rows]),
            "prompt_length": np.array([len(row["prompts"]) for row in rows]),
            "response_length": np.array([len(row["responses"]) for row in rows]),
            "is_padding": np.array([bool(row.get("is_padding")) for row in rows]),
        }
        return data, keys, metrics

    def _reward_batch(self, partition: str, keys: Sequence[str]) -> None:
        """Score a whole batch, if a colocated reward model takes turns with the rollout."""
        if self.reward_loop_manager.reward_loop_worker_handles is None:
            self._compute_reward_colocate(SampledKeys(keys, partition))

    def _compute_reward_colocate(self, batch: SampledKeys, metrics: Any = None) -> SampledKeys:
        rows = [self.queue.taken[batch.partition_id][key] for key in batch.keys]
        output = self.reward_loop_manager.compute_rm_score(rewards_batch(rows))
        for place, row in enumerate(rows):
            row["rm_scores"] = np.asarray(output.batch["rm_scores"])[place][: len(row["responses"])]
            row |= {name: output.non_tensor_batch[name][place] for name in output.meta_info["reward_extra_keys"]}
        return batch

    def _reward_batch_apart(self, partition: str, keys: Sequence[str]) -> None:
        """`_reward_batch` in a validation, for which the inference engines make room."""
        if self.reward_loop_manager.reward_loop_worker_handles is None:
            self.checkpoint_manager.sleep_replicas()
            self._reward_batch(partition, keys)
            self.checkpoint_manager.update_weights()

    def _pad(self, keys: Sequence[str]) -> list[str]:
        """Rows that fill up the last mini-batch, made of the first row."""
        n = self.config.actor_rollout_ref.rollout.n
        multiple = int(self.config.actor_rollout_ref.actor.get("ppo_mini_batch_size") or 1) * n
        if self.use_critic:
            multiple = math.lcm(multiple, int(self.config.critic.get("ppo_mini_batch_size") or 1) * n)
        uid = f"pad{self._new_uid().replace('-', '')}"
        taken = self.queue.taken["train"]
        rows = {
            f"{uid}_{number}_0": padding_row(taken[keys[0]], uid, number, self.tokenizer.eos_token_id)
            for number in range(-len(keys) % multiple)
        }
        taken.update(rows)
        return list(rows)

    def _metrics(self, batch: VerlDataProto) -> dict[str, Any]:
        real = batch.select_idxs(~batch.non_tensor_batch["is_padding"])
        columns = real.non_tensor_batch
        per_epoch = max(len(self.train_dataloader.dataset) // self.config.data.train_batch_size, 1)
        metrics = {
            "training/global_step": self.global_steps,
            "training/epoch": int((self.global_steps - 1) // per_epoch),
            **self._data_metrics(real, columns["prompt_length"], columns["response_length"]),
        }
        return metrics | {f"training/num_turns/{name}": metrics[f"num_turns/{name}"] for name in ("mean", "max", "min")}

    def _make_buffer(self, config: Any) -> ReplayBuffer:
        filters, sampler = config.algorithm.filter_groups, config.trainer.v1.sampler
        metric = None
        if filters.enable:
            if not filters.get("metric", None):
                raise ValueError("algorithm.filter_groups.metric must be set when group filtering is enabled")
            model = config.reward.reward_model
            assert not model.enable or model.enable_resource_pool, (
                "algorithm.filter_groups requires the reward metric at sampling time: use rule-based reward or "
                "reward.reward_model.enable_resource_pool=True. A colocated reward model computes rewards only "
                "after replay-buffer sampling."
            )
            metric = str(filters.metric)
        refill_failed = bool(sampler.get("sync_refill_failed_groups", False))
        if metric is not None or refill_failed:
            config.data.gen_batch_size = 1
        # Looked up by its name in verl, because hooks may have wrapped it there.
        buffer: ReplayBuffer = sys.modules[REPLAY_BUFFER].ReplayBuffer(
            self.queue,
            metric=metric,
            refill=self._add_prompts,
            refill_failed=refill_failed,
            max_inflight=int(filters.get("max_inflight_gen_batches", 1)) * int(config.data.train_batch_size),
        )
        return buffer


__all__ = ["MODULE", "V1Trainer"]
