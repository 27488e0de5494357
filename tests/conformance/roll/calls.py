"""Calls of reward workers without a rollout around them: batches of any size and many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.reward_scheduler import RewardScheduler
from roll.utils.functionals import reduce_metrics
from transformers import AutoTokenizer

from ..judges import Draft, encode, label_of, prompt_of
from .generated import generated

PROMPT_TOKENS = 24
RESPONSE_TOKENS = 16


def score(cluster: Any, requests: Sequence[Sequence[Sequence[int]]], tokenizer: Path) -> list[dict[str, Any]]:
    """Send every request, a list of (item, draft), to the workers in turn, as ROLL's scheduler streams them, all
    before the first answer is awaited. Describes the answers in order.
    """
    reads = AutoTokenizer.from_pretrained(tokenizer, padding_side="left")
    data = [_data(reads, [Draft(*draft) for draft in request], streamed=True) for request in requests]
    calls = [
        cluster.workers[place % len(cluster.workers)].compute_rewards.remote(batch) for place, batch in enumerate(data)
    ]
    return [_answer(answer) for answer in ray.get(calls)]


def schedule(
    clusters: Mapping[str, Any], rows: Sequence[Sequence[Any]], config: Any, tokenizer: Path
) -> dict[str, Any]:
    """Have ROLL's reward scheduler score rows of (domain, item, draft) together."""
    reads = AutoTokenizer.from_pretrained(tokenizer, padding_side="left")
    drafts = [Draft(*row[1:]) for row in rows]
    data = _data(reads, drafts, streamed=False, domains=[row[0] for row in rows])
    answer = asyncio.run(RewardScheduler().compute_rewards(data, dict(clusters), config))
    return _answer(answer)


def _data(
    tokenizer: Any, drafts: Sequence[Draft], *, streamed: bool, domains: Sequence[str] | None = None
) -> DataProto:
    prompts = tokenizer(
        [prompt_of(draft.item) for draft in drafts],
        padding="max_length",
        max_length=PROMPT_TOKENS,
        return_tensors="pt",
    )
    mask = prompts["attention_mask"]
    asked = DataProto.from_dict(
        tensors={
            "input_ids": prompts["input_ids"],
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clip(min=0),
        }
    )
    answers = [[*encode(draft.response), tokenizer.eos_token_id] for draft in drafts]
    data = generated(asked, answers, tokenizer, PROMPT_TOKENS + RESPONSE_TOKENS)
    columns = {
        "id": [str(draft.item) for draft in drafts],
        "prompt": [prompt_of(draft.item) for draft in drafts],
        "ground_truth": [label_of(draft.item) for draft in drafts],
        "domain": list(domains or ["judged"] * len(drafts)),
        "tag": list(domains or ["judged_tag"] * len(drafts)),
    }
    if streamed:
        columns["rollout_id"] = [f"{draft.item}/{draft.draft}" for draft in drafts]
    data.non_tensor_batch = {name: np.array(values, dtype=object) for name, values in columns.items()}
    data.meta_info = {"global_step": 0, "collect_unfinished": False}
    return data


def _answer(answer: DataProto) -> dict[str, Any]:
    metrics = answer.meta_info.get("metrics", {})
    return {
        "tensors": {
            name: {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "values": tensor.tolist()}
            for name, tensor in answer.batch.items()
        },
        "non_tensors": sorted(answer.non_tensor_batch.keys()),
        "metrics": dict(metrics),
        "reduced": reduce_metrics(dict(metrics)),
        "causes": answer.meta_info.get("qreward_failed"),
    }
