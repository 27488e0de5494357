"""Stand-ins for ROLL's inference and training workers: they answer from numbers and record what they are to train.

Which draft of an item a request asks for, no request says. So the inference worker counts: the drafts of an item are
asked for one after the other, or all at once, and never more than a group's until the data set begins anew.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.models.model_providers import default_tokenizer_provider
from roll.utils.functionals import concatenate_input_and_output, postprocess_generate
from torch.nn.utils.rnn import pad_sequence

from ..judges import GROUP_SIZE, Draft, decode, encode, item_of
from .scenarios import NOTES, describe

RECORD = "trained.jsonl"
"""The file in the pipeline's output directory to which the training worker writes one line a step."""


def generated(prompts: DataProto, answers: Sequence[Sequence[int]], tokenizer: Any, sequence_length: int) -> DataProto:
    """The batch of prompts (left-padded) with their answers, as many for each."""
    count = len(answers) // len(prompts)
    output = concatenate_input_and_output(
        input_ids=prompts.batch["input_ids"],
        output_ids=pad_sequence(
            [torch.tensor(answer) for answer in answers], batch_first=True, padding_value=tokenizer.pad_token_id
        ),
        num_return_sequences=count,
    )
    return postprocess_generate(
        prompts=prompts,
        output=output,
        num_return_sequences=count,
        sequence_length=sequence_length,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def texts_of(batch: DataProto) -> list[str]:
    """The responses of a batch, without what pads and ends them."""
    return [decode([token for token in row if token > 2]) for row in batch.batch["responses"].tolist()]


class InferWorker(Worker):
    """Answers a prompt with the drafts of its item."""

    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config=worker_config)
        self._asked: Counter[int] = Counter()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        self.pipeline_config = pipeline_config
        self.tokenizer = default_tokenizer_provider(pipeline_config.actor_train.model_args)

    async def generate_request(self, payload: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        answers = self._answers(payload["input_ids"], payload["sampling_params"]["n"])
        return {
            "finish_reasons": ["stop"] * len(answers),
            "output_token_ids": answers,
            "output_logprobs": [[-0.5] * len(answer) for answer in answers],
        }

    def forget(self) -> None:
        """Begin the drafts of every item anew, for another run with this worker."""
        self._asked.clear()

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Nothing to abort: requests are answered at once."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    async def generate(self, data: DataProto) -> DataProto:
        """The batch path (`generate_opt_level: 0`), as `roll.pipeline.base_worker.InferWorker` answers it."""
        count = data.meta_info["generation_config"]["num_return_sequences"]
        rows = zip(data.batch["input_ids"], data.batch["attention_mask"], strict=True)
        answers = [answer for ids, mask in rows for answer in self._answers(ids[mask.bool()].tolist(), count)]
        return generated(data, answers, self.tokenizer, self.pipeline_config.sequence_length)

    def _answers(self, prompt_ids: list[int], count: int) -> list[list[int]]:
        item = item_of(decode(prompt_ids))
        drafts = [Draft(item, (self._asked[item] + place) % GROUP_SIZE) for place in range(count)]
        self._asked[item] += count
        return [[*encode(draft.response), self.tokenizer.eos_token_id] for draft in drafts]


class TrainWorker(Worker):
    """Writes down what it is given to train, and when it begins and ends to use its devices."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        self.pipeline_config = pipeline_config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload_states(self, *_: Any, **__: Any) -> None:
        self._note("offload_states")

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
    def compute_log_probs(self, data: DataProto) -> DataProto:
        self._note("compute_log_probs")
        rows, length = data.batch["input_ids"].shape
        zeros = torch.zeros(rows, length - 1)
        return DataProto.from_dict(tensors={"log_probs": zeros, "entropy": zeros.clone()}, meta_info={"metrics": {}})

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
    def compute_values(self, data: DataProto) -> DataProto:
        rows, length = data.batch["input_ids"].shape
        return DataProto.from_dict(tensors={"values": torch.zeros(rows, length - 1)}, meta_info={"metrics": {}})

    @register(dispatch_mode=Dispatch.DP_MP_DISPATCH_FIRST, clear_cache=False)
    def train_step(self, data: DataProto) -> DataProto:
        self._note("train_step")
        if self.cluster_name == "actor_train":
            with (Path(self.pipeline_config.output_dir) / RECORD).open("a") as record:
                record.write(json.dumps(describe(data, texts_of(data))) + "\n")
        return DataProto(meta_info={"metrics": {f"{self.cluster_name}/loss": 0.0}})

    def _note(self, use: str) -> None:
        if path := os.environ.get(NOTES):
            with open(path, "a") as notes:
                notes.write(f"{self.cluster_name} /{use}\n")
