"""verl's agent loop workers: a trajectory is written, then its reward asked for while others are still being written.

Those of the legacy trainer (experimental/agent_loop/agent_loop.py) return a batch; those of V1
(trainer/ppo/v1/agent_loop_tq.py) put trajectories into the queue.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..tensors import as_float32, objects, padded
from .engine import AgentOutput, VerlEngine
from .protocol import TensorColumns, VerlDataProto
from .reward_managers import float32_column
from .transfer_queue import Prompt, TransferQueue

_NUMBER = "__number__"
_log = logging.getLogger("verl.trainer.ppo.v1")


class AgentLoopWorker:
    """The part of verl's agent loop workers that asks for rewards."""

    def __init__(self, reward_workers: Any, rng: random.Random) -> None:
        self.reward_workers = reward_workers
        self.reward_calls = 0
        self._rng = rng

    async def _compute_score(self, outputs: Sequence[AgentOutput], kwargs: Mapping[str, Any]) -> None:
        """Ask a reward worker, drawn by chance, for the score of a trajectory; its last output gets it. An output that
        has a score keeps it.
        """
        final = outputs[-1]
        if final.reward_score is not None or self.reward_workers is None:
            return
        data = reward_input(outputs, kwargs)
        self.reward_calls += 1
        result = await self._rng.choice(self.reward_workers).compute_score.remote(data)
        final.reward_score = result["reward_score"]
        final.extra_fields["reward_extra_info"] = result["reward_extra_info"]


class AgentLoopManager:
    """The part of verl's `AgentLoopManager` that starts workers: one here."""

    def __init__(self, reward_workers: Any, rng: random.Random) -> None:
        self.agent_loop_workers_class = AgentLoopWorker
        self._arguments = reward_workers, rng

    async def _init_agent_loop_workers(self) -> None:
        self.worker = self.agent_loop_workers_class(*self._arguments)


class AgentLoops:
    """Runs trajectories on the trainer's event loop. `worker` asks for their rewards."""

    def __init__(self, config: Any, engine: VerlEngine, worker: AgentLoopWorker) -> None:
        self.config = config
        self.engine = engine
        self.worker = worker

    @property
    def reward_calls(self) -> int:
        return self.worker.reward_calls

    async def score(self, outputs: list[AgentOutput], columns: Mapping[str, Any]) -> None:
        """Ask for the score of a trajectory, if it has none."""
        await self.worker._compute_score(outputs, columns)

    async def generate_sequences(self, batch: VerlDataProto) -> VerlDataProto:
        """A whole batch, as the legacy trainer has it generated: dealt to the agent loop workers in equal parts."""
        batch.non_tensor_batch.setdefault("priority", np.arange(len(batch), dtype=np.int64))
        seen: Counter[Any] = Counter()
        numbers = []
        for uid in batch.non_tensor_batch["uid"]:
            numbers.append(seen[uid])
            seen[uid] += 1
        batch.non_tensor_batch[_NUMBER] = np.array(numbers)
        parts = batch.chunk(self.config.actor_rollout_ref.rollout.agent.num_workers)
        return VerlDataProto.concat(await asyncio.gather(*map(self._generate_part, parts)))

    async def _generate_part(self, batch: VerlDataProto) -> VerlDataProto:
        columns = batch.non_tensor_batch
        names = [name for name in columns if name not in (_NUMBER, "__do_sample__", "agent_name")]
        sampled = columns.get("__do_sample__")
        tasks = []
        for row in range(len(batch)):
            kwargs = {name: columns[name][row] for name in names}
            greedy = sampled is not None and not sampled[row]
            tasks.append(
                asyncio.create_task(self._one(kwargs, int(columns[_NUMBER][row]), batch.meta_info, greedy=greedy))
            )
        return postprocess(
            self.config, await asyncio.gather(*tasks), columns, streamed=self.worker.reward_workers is not None
        )

    async def _one(
        self, kwargs: Mapping[str, Any], number: int, meta: Mapping[str, Any], *, greedy: bool
    ) -> AgentOutput:
        outputs = await self.engine.run(
            kwargs,
            number=number,
            validate=bool(meta.get("validate", False)),
            global_step=int(meta.get("global_steps", -1)),
            response_length=self.config.actor_rollout_ref.rollout.response_length,
            greedy=greedy,
        )
        if len(outputs) != 1:
            raise AttributeError(
                "'list' object has no attribute 'extra_fields': only the V1 trainer takes several outputs"
            )
        outputs[0].extra_fields["raw_prompt"] = kwargs["raw_prompt"]
        await self.score(outputs, kwargs)
        return outputs[0]


class QueuedAgentLoops(AgentLoops):
    """Runs the sessions of prompts on the trainer's event loop. `dropped`: uid, session and error of the failed."""

    def __init__(self, config: Any, engine: VerlEngine, worker: AgentLoopWorker, queue: TransferQueue) -> None:
        super().__init__(config, engine, worker)
        self.queue = queue
        self.dropped: list[tuple[str, int, BaseException]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, prompts: Sequence[dict[str, Any]], partition: str) -> None:
        """Begin these prompts, which have their uid and the step that they are of; on the event loop."""
        for columns in prompts:
            prompt = Prompt(columns["uid"], columns["global_steps"])
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
                    self.dropped.append((prompt.uid, number, error))
        prompt.status = "failure" if prompt.errors else "finished"
        self.queue.changed.set()

    async def _run_session(self, prompt: Prompt, columns: dict[str, Any], partition: str) -> None:
        outputs = await self.engine.run(
            columns,
            number=columns["session_id"],
            validate=partition == "val",
            global_step=columns["global_steps"],
            response_length=self.config.actor_rollout_ref.rollout.response_length,
        )
        if not outputs:
            return
        await self.score(outputs, columns)
        final = outputs[-1]
        if final.reward_score is not None:
            for output in outputs[:-1]:
                output.reward_score = final.reward_score
                output.extra_fields["reward_extra_info"] = final.extra_fields["reward_extra_info"]
        rows = [{**queue_fields(output), **columns} for output in outputs]
        for number, row in enumerate(rows):
            prompt.rows[f"{prompt.uid}_{columns['session_id']}_{number}"] = row


def reward_input(outputs: Sequence[AgentOutput], columns: Mapping[str, Any]) -> VerlDataProto:
    """What `run_single` gets: a row for each output of the trajectory, padded on the right."""
    count = len(outputs)
    whole = [output.prompt_ids + output.response_ids for output in outputs]
    batch = {
        "prompts": padded([output.prompt_ids for output in outputs]),
        "responses": padded([output.response_ids for output in outputs]),
        "attention_mask": padded([[1] * len(ids) for ids in whole]),
        "input_ids": padded(whole),
        "position_ids": padded([range(len(ids)) for ids in whole]),
    }
    return VerlDataProto(
        TensorColumns(batch, batch_size=count),
        {
            **{name: np.array([value] * count) for name, value in columns.items()},
            "__num_turns__": np.array([output.num_turns for output in outputs]),
            "tool_extra_fields": np.array([output.extra_fields for output in outputs], dtype=object),
            "prompt_len": np.array([len(output.prompt_ids) for output in outputs]),
            "response_len": np.array([len(output.response_ids) for output in outputs]),
        },
    )


def postprocess(
    config: Any, outputs: Sequence[AgentOutput], columns: Mapping[str, Any], *, streamed: bool
) -> VerlDataProto:
    """One batch of the legacy trainer: prompts padded on the left, responses on the right, scores at the last tokens.

    The first row's extra info says which keys all have: another row that lacks one is a `KeyError`. If any row has no
    score, none has.
    """
    rollout = config.actor_rollout_ref.rollout
    wide, long = int(rollout.prompt_length), int(rollout.response_length)
    prompts = padded([output.prompt_ids[::-1] for output in outputs], width=wide)[:, ::-1]
    prompt_mask = padded([[1] * len(output.prompt_ids) for output in outputs], width=wide)[:, ::-1]
    responses = padded([output.response_ids for output in outputs], width=long)
    there = padded([[1] * len(output.response_ids) for output in outputs], width=long)
    mask = padded([output.response_mask for output in outputs], width=long) * there
    attention = np.concatenate([prompt_mask, there], axis=1)
    tensors: dict[str, Any] = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": np.clip(attention.cumsum(axis=-1) - 1, 0, None),
    }
    scores = [output.reward_score for output in outputs]
    has_scores = all(score is not None for score in scores)
    if has_scores:
        rewards = np.zeros(mask.shape, dtype=np.float32)
        rewards[np.arange(len(outputs)), there.sum(axis=1) - 1] = float32_column(scores)
        tensors["rm_scores"] = rewards
    columns_by_name: dict[str, Any] = {
        "__num_turns__": np.array([output.num_turns for output in outputs], dtype=np.int32)
    }
    if not streamed:
        columns_by_name |= columns
    infos = [output.extra_fields.get("reward_extra_info", {}) for output in outputs]
    keys = list(infos[0])
    columns_by_name |= {key: np.array([info[key] for info in infos]) for key in keys}
    standing = {"turn_scores", "tool_rewards", "min_global_steps", "max_global_steps", "extras"}
    for name in sorted({name for output in outputs for name in output.extra_fields} | standing):
        columns_by_name[name] = objects(output.extra_fields.get(name) for output in outputs)
    meta = {"reward_extra_keys": keys} if has_scores else {}
    return VerlDataProto(TensorColumns(tensors, batch_size=len(outputs)), columns_by_name, meta)


def queue_fields(output: AgentOutput) -> dict[str, Any]:
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


__all__ = ["AgentLoopManager", "AgentLoopWorker", "AgentLoops", "QueuedAgentLoops"]
