"""Calls of reward workers without a rollout around them: batches of any size and many at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from roll.distributed.scheduler.protocol import DataProto
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
    data = [_data(reads, [Draft(*draft) for draft in request]) for request in requests]
    calls = [
        cluster.workers[place % len(cluster.workers)].compute_rewards.remote(batch) for place, batch in enumerate(data)
    ]
    return [
        {
            "rewards": answer.batch["response_level_rewards"].tolist(),
            "metrics": dict(answer.meta_info["metrics"]),
            "causes": answer.meta_info["qreward_failed"],
        }
        for answer in ray.get(calls)
    ]


def _data(tokenizer: Any, drafts: Sequence[Draft]) -> DataProto:
    texts = [prompt_of(draft.item) for draft in drafts]
    prompts = tokenizer(texts, padding="max_length", max_length=PROMPT_TOKENS, return_tensors="pt")
    mask = prompts["attention_mask"]
    position_ids = (mask.cumsum(-1) - 1).clip(min=0)
    asked = DataProto.from_dict(
        tensors={"input_ids": prompts["input_ids"], "attention_mask": mask, "position_ids": position_ids}
    )
    answers = [[*encode(draft.response), tokenizer.eos_token_id] for draft in drafts]
    data = generated(asked, answers, tokenizer, PROMPT_TOKENS + RESPONSE_TOKENS)
    columns = {
        "id": [str(draft.item) for draft in drafts],
        "prompt": texts,
        "ground_truth": [label_of(draft.item) for draft in drafts],
        "domain": ["judged"] * len(drafts),
        "tag": ["judged_tag"] * len(drafts),
        "rollout_id": [f"{draft.item}/{draft.draft}" for draft in drafts],
    }
    data.non_tensor_batch = {name: np.array(values, dtype=object) for name, values in columns.items()}
    data.meta_info = {"global_step": 0, "collect_unfinished": False}
    return data
