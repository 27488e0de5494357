"""verl's agent loop workers of the V1 trainer (trainer/ppo/v1/agent_loop_tq.py): trajectories go into the queue."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from .agent_loop import AgentLoops
from .engine import AgentOutput, VerlEngine
from .tensors import as_float32
from .transfer_queue import Prompt, TransferQueue

_log = logging.getLogger("verl.trainer.ppo.v1")


class QueuedAgentLoops(AgentLoops):
    """Runs the sessions of prompts on the trainer's event loop. `dropped`: uid, session and error of the failed."""

    def __init__(self, config: Any, engine: VerlEngine, workers: Any, rng: random.Random, queue: TransferQueue) -> None:
        super().__init__(config, engine, workers, rng)
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


__all__ = ["QueuedAgentLoops", "queue_fields"]
