"""What generation leaves behind, for stand-ins: ROLL's own functions make the batch, with its shifts and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from roll.distributed.scheduler.protocol import DataProto
from roll.utils.functionals import concatenate_input_and_output, postprocess_generate
from torch.nn.utils.rnn import pad_sequence

from ..judges import decode


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
