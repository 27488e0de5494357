"""Sends weights from a trainer to separate rollout servers, for trainers whose rollout does not share their devices.

verl's checkpoint engines for this move weights between GPUs (NCCL, NIXL). Here the trainer sends them to each server
over Ray, and the workers in between do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import ray
import torch
from ray.util import list_named_actors
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

BACKEND = "cpu_ray"
"""The value of `actor_rollout_ref.rollout.checkpoint_engine.backend` that selects this engine."""

SERVERS = "cpu_hf_server_"
"""The prefix of the names of rollout servers."""


class DirectCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl is not typed
    """A `CheckpointEngine` without its own process group."""

    def __init__(self, bucket_size: int, **_: Any) -> None:
        self._bucket_size = bucket_size

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        pass

    def finalize(self) -> None:
        pass

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Send the weights to every server of this job. Every rank reads the whole iterator; the first one sends."""
        state = {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in weights}
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        names = [name for name in list_named_actors() if name.startswith(SERVERS)]
        for server in [ray.get_actor(name) for name in names]:
            await server.update_weights.remote(state, global_steps)

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return nothing, because the servers have them already."""
        return iter(())


def install() -> None:
    """Register the engine under `BACKEND`."""
    CheckpointEngineRegistry.register(BACKEND)(DirectCheckpointEngine)
