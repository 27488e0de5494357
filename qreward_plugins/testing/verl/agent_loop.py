"""verl's agent loop workers: a trajectory is written, then its reward asked for while others are still being written.

Those of the legacy trainer (experimental/agent_loop/agent_loop.py) return a batch; those of V1
(trainer/ppo/v1/agent_loop_tq.py) put trajectories into the queue.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from ..data_proto import VerlColumns, VerlDataProto, as_float32, padded
from .generation import AgentOutput, VerlEngine


class AgentLoopWorker:
    """Writes trajectories and asks for their rewards. `reward_workers`: None where nobody is asked meanwhile."""

    def __init__(self, reward_workers: Any, config: Any, engine: VerlEngine, rng: random.Random) -> None:
        self.reward_workers = reward_workers
        self._length = int(config.actor_rollout_ref.rollout.response_length)
        self._engine, self._rng = engine, rng

    async def run(self, columns: Mapping[str, Any], number: int, **named: Any) -> list[AgentOutput]:
        """The scored outputs of a trajectory, the `number`-th one of its prompt."""
        outputs = await self._engine.run(columns, number, response_length=self._length, **named)
        if outputs:
            await self._compute_score(outputs, columns)
        return outputs

    async def _compute_score(self, outputs: Sequence[AgentOutput], kwargs: Mapping[str, Any]) -> None:
        """Ask a reward worker, drawn by chance, for the score of a trajectory; its last output gets it. An output that
        has a score keeps it.
        """
        final = outputs[-1]
        if final.reward_score is None and self.reward_workers is not None:
            worker = self._rng.choice(self.reward_workers)
            result = await worker.compute_score.remote(reward_input(outputs, kwargs))
            final.reward_score = result["reward_score"]
            final.extra_fields["reward_extra_info"] = result["reward_extra_info"]


class AgentLoopManager:
    """`AgentLoopManager`: it starts the workers, one here, and has the legacy trainer's batches written. `run` runs a
    coroutine on the event loop of the actors.
    """

    def __init__(self, config: Any, run: Callable[[Coroutine[Any, Any, Any]], Any], *arguments: Any) -> None:
        self.config = config
        self.agent_loop_workers_class = AgentLoopWorker
        self._run, self._arguments = run, arguments
        self._run(self._init_agent_loop_workers())

    async def _init_agent_loop_workers(self) -> None:
        reward_workers, *others = self._arguments
        self.worker = self.agent_loop_workers_class(reward_workers, self.config, *others)

    def generate_sequences(self, prompts: VerlDataProto) -> VerlDataProto:
        """A whole batch, with scores at the last tokens.

        The first row's extra info says which keys all have: another row that lacks one is a `KeyError`. If any row has
        no score, none has.
        """
        rollout, meta = self.config.actor_rollout_ref.rollout, prompts.meta_info
        uids = list(prompts.non_tensor_batch["uid"])
        named = {"validate": bool(meta.get("validate")), "global_step": int(meta["global_steps"])}

        async def written() -> list[list[AgentOutput]]:
            rows = (
                self.worker.run(item.non_tensor_batch, uids[:row].count(uids[row]), **named)
                for row, item in enumerate(prompts)
            )
            return await asyncio.gather(*rows)

        trajectories = self._run(written())
        if any(len(each) != 1 for each in trajectories):
            raise NotImplementedError("several outputs of a trajectory: only verl's V1 trainer takes them")
        outputs = [output for (output,) in trajectories]
        batch = batch_of([fields_of(output) for output in outputs], rollout.prompt_length, rollout.response_length)
        scores = [output.reward_score for output in outputs]
        infos = [output.extra_fields.get("reward_extra_info", {}) for output in outputs]
        found = {key: np.array([info[key] for info in infos]) for key in infos[0]}
        meta = {}
        if all(score is not None for score in scores):
            rewards = np.zeros(batch["responses"].shape, dtype=np.float32)
            ends = [len(output.response_ids) - 1 for output in outputs]
            rewards[np.arange(len(outputs)), ends] = [as_float32(score, may_overflow=True) for score in scores]
            batch["rm_scores"] = rewards
            meta = {"reward_extra_keys": list(found)}
        turns = np.array([output.num_turns for output in outputs], dtype=np.int32)
        return VerlDataProto(batch, {"__num_turns__": turns, **found}, meta)


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
        VerlColumns(batch, count),
        {
            **{name: np.array([value] * count) for name, value in columns.items()},
            "__num_turns__": np.array([output.num_turns for output in outputs]),
            "tool_extra_fields": np.array([output.extra_fields for output in outputs], dtype=object),
            "prompt_len": np.array([len(output.prompt_ids) for output in outputs]),
            "response_len": np.array([len(output.response_ids) for output in outputs]),
        },
    )


def batch_of(rows: Sequence[Mapping[str, Any]], wide: int = 0, long: int = 0) -> VerlColumns:
    """Rows of tokens as a batch: prompts padded on the left to at least `wide` tokens, responses on the right to at
    least `long`.
    """
    prompts, responses = ([list(row[name]) for row in rows] for name in ("prompts", "responses"))
    there = padded([[1] * len(ids) for ids in responses], width=long)
    prompt_mask = padded([[1] * len(ids) for ids in prompts], width=wide, left=True)
    tensors = {
        "prompts": padded(prompts, width=wide, left=True),
        "responses": padded(responses, width=long),
        "response_mask": padded([row["response_mask"] for row in rows], width=long) * there,
        "attention_mask": np.concatenate([prompt_mask, there], axis=1),
    }
    return VerlColumns(tensors, len(rows))


def fields_of(output: AgentOutput) -> dict[str, Any]:
    """An output as a row."""
    return {
        "prompts": output.prompt_ids,
        "responses": output.response_ids,
        "response_mask": output.response_mask,
        "num_turns": output.num_turns,
        "extra_fields": output.extra_fields,
    }
