"""A batch of ROLL's in plain numbers: what the tests look at."""

from __future__ import annotations

from typing import Any

from roll.distributed.scheduler.protocol import DataProto

from ..judges import decode


def describe(batch: DataProto) -> dict[str, Any]:
    """The samples of a batch in order, and the names of what it carries."""
    tensors = batch.batch
    return {
        "samples": [
            {
                "response": decode([int(token) for token in response if token > 2]),
                "domain": domain,
                "score": score.item(),
                "reward": reward.item(),
                "advantage": None if advantages is None else _largest(advantages),
                "mask": int(mask.sum()),
            }
            for response, domain, score, reward, advantages, mask in zip(
                tensors["responses"].tolist(),
                batch.non_tensor_batch["domain"],
                tensors["scores"],
                tensors["response_level_rewards"],
                tensors["advantages"] if "advantages" in tensors else [None] * len(batch),
                tensors["final_response_mask" if "final_response_mask" in tensors else "response_mask"],
                strict=True,
            )
        ],
        "columns": sorted([*tensors.keys(), *batch.non_tensor_batch.keys()]),
    }


def _largest(values: Any) -> float:
    """The value farthest from zero; NaN where there is one."""
    return values[values.abs().argmax()].item() if values.isfinite().all() else float("nan")
