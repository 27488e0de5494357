"""Groups of finished responses on their way from generation to training, in verl's fully asynchronous trainer
(`MessageQueue`, and `RolloutSample` of experimental/fully_async_policy/detach_utils.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .protocol import VerlDataProto
from .tensors import objects


@dataclass
class RolloutSample:
    """All responses of one prompt: before generation the rows of the prompt, afterwards a batch."""

    full_batch: VerlDataProto
    sample_id: str
    epoch: int
    rollout_status: dict[str, Any] = field(default_factory=dict)

    def set_uid(self) -> None:
        """Name the group after the sample, in all rows."""
        count = len(self.full_batch)
        self.full_batch.non_tensor_batch["uid"] = objects([f"uid_{self.sample_id}"] * count)


class SampleQueue:
    """`MessageQueue`: a full one drops its oldest sample. For one event loop."""

    def __init__(self, max_queue_size: int) -> None:
        self._samples: deque[RolloutSample | None] = deque()
        self._max = max_queue_size
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._samples)

    async def put_sample(self, sample: RolloutSample | None) -> bool:
        """Append a sample, None at the end of generation; False if another was dropped for it."""
        async with self._changed:
            full = len(self._samples) >= self._max
            if full:
                self._samples.popleft()
            self._samples.append(sample)
            self._changed.notify_all()
        return not full

    async def get_sample(self) -> RolloutSample | None:
        """Wait for the oldest sample and take it out."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._samples)
            return self._samples.popleft()


def prompt_batch(columns: Mapping[str, Any], config: Any) -> VerlDataProto:
    """The rows of one prompt, which the data loader gave, as they are generated."""
    rows = {name: values for name, values in columns.items() if name != "dummy_tensor"}
    if not (config.actor_rollout_ref.rollout.get("multi_turn") or {}).get("enable", False):
        rows["agent_name"] = objects(["single_turn_agent"] * len(columns["raw_prompt"]))
    return VerlDataProto(None, rows).repeat(int(config.actor_rollout_ref.rollout.n))


def assemble_batch(samples: Sequence[RolloutSample]) -> VerlDataProto:
    """One batch of several groups. The first sample's columns and extra-info keys, in their order, are taken for all:
    another's that differ are an `AssertionError`.

    The versions of the weights in `meta_info`: `max_global_steps` is the one that finished a response,
    `min_global_steps` the one that began it.
    """
    batch = VerlDataProto.concat([sample.full_batch for sample in samples])
    batch.meta_info["global_token_num"] = np.asarray(batch.batch["attention_mask"]).sum(axis=-1).tolist()
    ends = batch.non_tensor_batch["max_global_steps"]
    spans = [abs(end - start) for end, start in zip(ends, batch.non_tensor_batch["min_global_steps"], strict=True)]
    partial = sum(span != 0 for span in spans)
    batch.meta_info |= {
        "param_version_diversity": len(set(ends)),
        "trajectory_param_versions": ends,
        **{f"fully_async/{name}": value for name, value in samples[0].rollout_status.items()},
        "fully_async/partial/total_partial_num": partial,
        "fully_async/partial/partial_ratio": partial / len(spans),
        "fully_async/partial/max_partial_span": max(spans),
    }
    return batch


__all__ = ["RolloutSample", "SampleQueue", "assemble_batch", "prompt_batch"]
