"""What a user of slime brings along: a custom generate function that makes several training samples of one answer."""

from __future__ import annotations

import copy
from typing import Any

from ..judges import encode, read_response
from .scenarios import PARTS


async def fan_out(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
    """slime's own generation, and what becomes of its answer."""
    from slime.rollout.sglang_rollout import generate

    return parts_of(args, await generate(args, sample, sampling_params))


def parts_of(args: Any, answered: Any) -> list[Any]:
    """An answer, and it again with each further part appended; one rollout id for all."""
    answered.rollout_id = answered.index
    samples = [answered]
    if answered.status.value != "completed":
        return samples
    for part in range(1, PARTS):
        sibling = copy.deepcopy(answered)
        text = f" part {part}"
        tokens = encode(text)
        sibling.append_response_tokens(args, tokens=tokens, log_probs=[-0.5] * len(tokens), text=text)
        read_response(sibling.response)
        samples.append(sibling)
    return samples
