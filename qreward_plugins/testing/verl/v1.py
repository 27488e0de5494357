"""verl's V1 trainer (trainer/ppo/v1): prompts are handed out, their trajectories come back by way of a queue."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .base import Setup, TrainerBase, compute_advantage, critic_values
from .engine import AgentOutput
from .metrics import data_metrics
from .protocol import TensorColumns, VerlDataProto
from .results import VerlStep, VerlValidation
from .tensors import as_float32, padded
from .transfer_queue import FILTERED_COUNTS, Prompt, ReplayBuffer, TransferQueue
from .transfer_queue import MODULE as REPLAY_BUFFER
from .validation import named

_log = logging.getLogger("verl.trainer.ppo.v1")

MODULE = "verl.trainer.ppo.v1.trainer_base"
PADDED_PROMPT = 127
"""Tokens in the prompt of a row that only fills up a mini-batch."""


class V1Trainer(TrainerBase):
    """`PPOTrainer`: synchronous, or asynchronous where groups are replaced and batches prepared ahead."""

    def __init__(self, config: Any, setup: Setup, queue: TransferQueue) -> None:
        self.trainer_mode = str(config.trainer.v1.trainer_mode)
        if self.trainer_mode not in ("sync", "colocate_async", "separate_async"):
            raise ValueError(f"Unknown trainer: {self.trainer_mode}")
        self.queue = queue
        self.sync_steps = int(config.trainer.v1[self.trainer_mode].get("parameter_sync_step", 1))
        self.replay_buffer = self._make_buffer(config)
        super().__init__(config, setup)
        self._batches = iter(self.train_dataloader)
        self._begun = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped: list[tuple[str, int, BaseException]] = []

    def step(self) -> VerlStep:
        """One step of the training loop."""
        self.global_steps += 1
        self._dropped, self.replay_buffer.evicted = [], []
        calls = self.agent_loops.reward_calls
        size = self.config.data.train_batch_size
        assert size % self.sync_steps == 0, (
            f"train_batch_size ({size}) must be divisible by parameter_sync_step ({self.sync_steps})"
        )
        self.setup.run(self._prepare())
        metrics: dict[str, Any] = {}
        batches, keys = [], []
        for _ in range(self.sync_steps):
            batch, names = self._step_once(metrics, size // self.sync_steps)
            batches.append(batch)
            keys += names
        batch = _joined(batches)
        self._compute_metrics(batch, metrics)
        counts = metrics.pop(FILTERED_COUNTS, None)
        told = self._log(metrics)
        if counts:
            told[FILTERED_COUNTS] = counts
        rows = [self.queue.taken["train"].get(key, {}) for key in keys]
        mask = np.asarray(batch.batch["response_mask"])
        step = VerlStep(
            global_step=self.global_steps,
            batch=batch,
            responses=[self._text(row) for row in rows],
            uids=[key.rsplit("_", 2)[0] for key in keys],
            sessions=[int(key.rsplit("_", 2)[1]) for key in keys],
            extra_info=[dict(row.get("extra_fields", {}).get("reward_extra_info", {})) for row in rows],
            metrics=told,
            reward_calls=self.agent_loops.reward_calls - calls,
            dropped=self._dropped,
            evicted=self.replay_buffer.evicted,
            padding=[bool(row.get("is_padding")) for row in rows],
        )
        assert len(mask) == len(keys)
        self.queue.taken["train"].clear()
        return step

    def validate(self) -> VerlValidation:
        """One validation, logged."""
        self._seen: dict[str, Any] = {}
        metrics = self._validate()
        assert metrics, f"val_metrics={metrics!r}"
        return VerlValidation(self.global_steps, self._log(metrics), **self._seen)

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
            expected |= {(str(each["data_source"]), each["uid"]): count for each in prompts}
            sampled = self.setup.run(self._generate_and_sample(prompts))
            keys = [key for prompt in sampled for key in prompt.rows]
            if self.reward_loop_manager.reward_loop_worker_handles is None:
                self._reward_batch("val", keys)
            # Of several outputs of a session the last one counts.
            last = {key.rsplit("_", 1)[0]: key for key in keys}
            rows = [self.queue.taken["val"][key] for key in last.values()]
            if rows and not all("rm_scores" in row for row in rows):
                raise KeyError('key "rm_scores" not found in TensorDict')
            batch_scores = [float(np.asarray(row["rm_scores"]).sum()) for row in rows]
            uids += [str(row["uid"]) for row in rows]
            texts += [self._text(row) for row in rows]
            scores += batch_scores
            turns += [row["num_turns"] for row in rows]
            sources += [row["data_source"] for row in rows]
            _add_infos(infos, batch_scores, [row["extra_fields"].get("reward_extra_info", {}) for row in rows])
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
        self._submit(prompts, "val")
        return (await self.replay_buffer.sample(self.global_steps, "val", len(prompts)))[0]

    async def _prepare(self) -> None:
        if self.trainer_mode != "sync" and not self._begun:
            ahead = float(self.config.trainer.v1[self.trainer_mode].num_warmup_batches)
            self._add_prompts(math.floor(ahead * self.config.data.train_batch_size))
        self._begun = True
        self._add_prompts(self.config.data.train_batch_size)

    def _add_prompts(self, count: int) -> None:
        """Hand out exactly so many prompts."""
        size = self.config.data.get("gen_batch_size", None) or self.config.data.train_batch_size
        if count <= 0 or count % size:
            raise ValueError(
                f"num_prompts ({count}) must be a positive multiple of gen_batch_size "
                f"({size}); it is submitted in whole gen_batch_size dataloader fetches."
            )
        prompts: list[dict[str, Any]] = []
        for _ in range(count // size):
            columns = next(self._batches, None)
            if columns is None:
                self._batches = iter(self.train_dataloader)
                columns = next(self._batches)
            prompts += self._prompts(columns)
        self._submit(prompts, "train")

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

    def _submit(self, prompts: Sequence[dict[str, Any]], partition: str) -> None:
        for columns in prompts:
            prompt = Prompt(columns["uid"], self.global_steps)
            self.queue.partitions[partition][prompt.uid] = prompt
            task = asyncio.ensure_future(self._run_prompt(prompt, columns, partition))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_prompt(self, prompt: Prompt, columns: dict[str, Any], partition: str) -> None:
        rollout = self.config.actor_rollout_ref.rollout
        columns.pop("agent_name", None)
        count = int(columns.pop("__rollout_n__", rollout.val_kwargs.n if partition == "val" else rollout.n))
        sessions = [self._run_session(prompt, {**columns, "session_id": number}, partition) for number in range(count)]
        results = await asyncio.gather(*sessions, return_exceptions=True)
        for number, error in enumerate(results):
            if isinstance(error, BaseException):
                _log.error("Error in _run_prompt for uid=%s: %r", prompt.uid, error)
                prompt.errors.append((number, error))
                if partition == "train":
                    self._dropped.append((prompt.uid, number, error))
        prompt.status = "failure" if prompt.errors else "finished"
        self.queue.changed.set()

    async def _run_session(self, prompt: Prompt, columns: dict[str, Any], partition: str) -> None:
        outputs = await self.agent_loops.engine.run(
            columns,
            number=columns["session_id"],
            validate=partition == "val",
            global_step=self.global_steps,
            response_length=self.config.actor_rollout_ref.rollout.response_length,
        )
        if not outputs:
            return
        await self.agent_loops.score(outputs, columns)
        final = outputs[-1]
        if final.reward_score is not None:
            for output in outputs[:-1]:
                output.reward_score = final.reward_score
                output.extra_fields["reward_extra_info"] = final.extra_fields["reward_extra_info"]
        rows = [{**_fields(output), **columns} for output in outputs]
        for number, row in enumerate(rows):
            prompt.rows[f"{prompt.uid}_{columns['session_id']}_{number}"] = row

    def _step_once(self, metrics: dict[str, Any], size: int) -> tuple[VerlDataProto, list[str]]:
        prompts, told = self.setup.run(self.replay_buffer.sample(self.global_steps, "train", size))
        metrics.update(told)
        keys = [key for prompt in prompts for key in prompt.rows]
        if self.reward_loop_manager.reward_loop_worker_handles is None:
            self._reward_batch("train", keys)
        keys += self._pad(keys)
        rows = [self.queue.taken["train"][key] for key in keys]
        # One row without a score, and no row has one.
        if not all("rm_scores" in row for row in rows):
            raise KeyError('key "rm_scores" not found in TensorDict')
        data = VerlDataProto(
            TensorColumns(
                {
                    "prompts": padded([row["prompts"] for row in rows]),
                    "responses": padded([row["responses"] for row in rows]),
                    "response_mask": padded([row["response_mask"] for row in rows]),
                    "token_level_scores": padded([row["rm_scores"] for row in rows], dtype=np.float32),
                },
                batch_size=len(rows),
            ),
            {"uid": np.array([str(row["uid"]) for row in rows], dtype=object)},
        )
        data.batch["rm_scores"] = data.batch["token_level_rewards"] = data.batch["token_level_scores"]
        data.non_tensor_batch["__num_turns__"] = np.array([row["num_turns"] for row in rows])
        if self.use_critic:
            data.batch["values"] = critic_values(self.setup, data)
        algorithm = self.config.algorithm
        # By its name in verl, as whoever wraps it there expects; only the column `uid` is there for estimators.
        turns = data.non_tensor_batch.pop("__num_turns__")
        data = sys.modules[MODULE].compute_advantage_for_multi_trajectories(
            data,
            batch_keys=keys,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )
        data.non_tensor_batch["__num_turns__"] = turns
        data.non_tensor_batch["prompt_length"] = np.array([len(row["prompts"]) for row in rows])
        data.non_tensor_batch["response_length"] = np.array([len(row["responses"]) for row in rows])
        data.non_tensor_batch["is_padding"] = np.array([bool(row.get("is_padding")) for row in rows])
        return data, keys

    def _reward_batch(self, partition: str, keys: Sequence[str]) -> None:
        """Rewards of a whole batch, with a colocated reward model: a manager learns the prompts and nothing else."""
        rows = [self.queue.taken[partition][key] for key in keys]
        prompts, responses = ([row[name] for row in rows] for name in ("prompts", "responses"))
        masks = [padded([[1] * len(ids) for ids in each]) for each in (prompts, responses)]
        tensors = {
            "prompts": padded(prompts),
            "responses": padded(responses),
            "attention_mask": np.concatenate(masks, axis=1),
        }
        raw = np.empty(len(rows), dtype=object)
        raw[:] = [row["raw_prompt"] for row in rows]
        output = self.reward_loop_manager.compute_rm_score(
            VerlDataProto(TensorColumns(tensors, batch_size=len(rows)), {"raw_prompt": raw})
        )
        for row, rewards in zip(rows, np.asarray(output.batch["rm_scores"]), strict=True):
            row["rm_scores"] = rewards[: len(row["responses"])]

    def _pad(self, keys: Sequence[str]) -> list[str]:
        """Rows that fill up the last mini-batch, made of the first row."""
        n = self.config.actor_rollout_ref.rollout.n
        multiple = int(self.config.actor_rollout_ref.actor.get("ppo_mini_batch_size") or 1) * n
        if self.use_critic:
            multiple = math.lcm(multiple, int(self.config.critic.get("ppo_mini_batch_size") or 1) * n)
        uid = f"pad{self._new_uid().replace('-', '')}"
        eos = self.tokenizer.eos_token_id
        taken = self.queue.taken["train"]
        names = []
        for number in range(-len(keys) % multiple):
            names.append(f"{uid}_{number}_0")
            taken[names[-1]] = copy.deepcopy(taken[keys[0]]) | {
                "prompts": [eos] * PADDED_PROMPT,
                "responses": [eos],
                "response_mask": [0],
                "rm_scores": np.zeros(1, dtype=np.float32),
                "num_turns": 0,
                "uid": uid,
                "session_id": number,
                "is_padding": True,
            }
        return names

    def _compute_metrics(self, batch: VerlDataProto, metrics: dict[str, Any]) -> None:
        real = batch.select_idxs(~batch.non_tensor_batch["is_padding"]) if len(batch) else batch
        rewards = real.batch["token_level_rewards"]
        metrics |= {"training/global_step": self.global_steps, "training/epoch": self._epoch}
        metrics |= data_metrics(
            scores=np.asarray(real.batch["token_level_scores"]).sum(axis=-1),
            rewards=np.asarray(rewards).sum(axis=-1),
            advantages=real.batch["advantages"],
            returns=real.batch["returns"],
            mask=real.batch["response_mask"],
            prompt_lengths=real.non_tensor_batch["prompt_length"],
            response_lengths=real.non_tensor_batch["response_length"],
            widths=(real.batch["prompts"].shape[1], real.batch["responses"].shape[1]),
            num_turns=real.non_tensor_batch["__num_turns__"],
            values=real.batch["values"] if self.use_critic else None,
        )
        for name in ("mean", "max", "min"):
            metrics[f"training/num_turns/{name}"] = metrics[f"num_turns/{name}"]

    @property
    def _epoch(self) -> int:
        per_epoch = max(len(self.train_dataloader.dataset) // self.config.data.train_batch_size, 1)
        return int((self.global_steps - 1) // per_epoch)

    def _text(self, row: Mapping[str, Any]) -> str:
        return str(self.tokenizer.decode(row.get("responses", []), skip_special_tokens=True))

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
        is_async = self.trainer_mode != "sync"
        refill_failed = bool(sampler.get("sync_refill_failed_groups", False))
        if metric is not None or refill_failed or is_async:
            config.data.gen_batch_size = 1
        # By its name in verl, as whoever wraps it there expects.
        buffer: ReplayBuffer = sys.modules[REPLAY_BUFFER].ReplayBuffer(
            self.queue,
            is_async=is_async,
            metric=metric,
            refill=self._add_prompts,
            refill_failed=refill_failed,
            max_inflight=int(filters.get("max_inflight_gen_batches", 1)) * int(config.data.train_batch_size),
            max_age=sampler.max_off_policy_threshold,
            drops_old=sampler.max_off_policy_strategy == "drop",
        )
        return buffer


def compute_advantage_for_multi_trajectories(
    data: VerlDataProto, batch_keys: Sequence[str], adv_estimator: Any, **named: Any
) -> VerlDataProto:
    """With GRPO the last output of each session is what counts, and the others of the session get its advantage."""
    if str(adv_estimator) != "grpo":
        return compute_advantage(data, adv_estimator=adv_estimator, **named)
    last: dict[str, tuple[int, int]] = {}
    for row, key in enumerate(batch_keys):
        session, _, index = key.rpartition("_")
        if session not in last or last[session][0] < int(index):
            last[session] = (int(index), row)
    places = {session: place for place, session in enumerate(last)}
    final = compute_advantage(data.select_idxs([row for _, row in last.values()]), adv_estimator=adv_estimator, **named)
    first = np.asarray(final.batch["response_mask"]).argmax(axis=1)
    scores = np.asarray(final.batch["advantages"])[np.arange(len(final)), first]
    chosen = scores[[places[key.rpartition("_")[0]] for key in batch_keys]]
    tokens = chosen[:, None] * np.asarray(data.batch["response_mask"]).astype(np.float32)
    data.batch["advantages"], data.batch["returns"] = tokens, tokens.copy()
    return data


def _fields(output: AgentOutput) -> dict[str, Any]:
    """An output in the queue: its score stands at its last token. Raises what torch raises where there is none."""
    fields: dict[str, Any] = {
        "prompts": output.prompt_ids,
        "responses": output.response_ids,
        "response_mask": output.response_mask,
        "num_turns": output.num_turns,
        "extra_fields": output.extra_fields,
    }
    if output.reward_score is not None:
        rewards, score = np.zeros(len(output.response_mask), dtype=np.float32), as_float32(output.reward_score)
        if not len(rewards):
            raise IndexError("index -1 is out of bounds for dimension 0 with size 0")
        rewards[-1] = score
        fields["rm_scores"] = rewards
    return fields


def _add_infos(infos: dict[str, list[Any]], scores: Sequence[float], rows: Sequence[Mapping[str, Any]]) -> None:
    before = len(infos["reward"])
    infos["reward"] += scores
    for place, row in enumerate(rows):
        for name in infos:
            if name != "reward" and name not in row:
                infos[name].append(None)
        for name, value in row.items():
            infos.setdefault(name, [None] * (before + place)).append(value)


def _joined(batches: Sequence[VerlDataProto]) -> VerlDataProto:
    """Batches of different widths as one, with the lengths of prompts and responses."""
    names = list(batches[0].batch)
    tensors = {}
    for name in names:
        rows = [row for batch in batches for row in np.asarray(batch.batch[name])]
        tensors[name] = padded(rows, dtype=rows[0].dtype)
    columns = {
        name: np.concatenate([batch.non_tensor_batch[name] for batch in batches])
        for name in batches[0].non_tensor_batch
    }
    return VerlDataProto(TensorColumns(tensors, batch_size=sum(map(len, batches))), columns)


__all__ = ["MODULE", "V1Trainer", "compute_advantage_for_multi_trajectories"]
