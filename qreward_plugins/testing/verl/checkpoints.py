"""verl's `CheckpointEngineManager` (checkpoint_engine/base.py): when inference engines sleep, and when they wake.

Nothing sleeps here. But hooks of reward managers see the calls, and tests see what is awake (`rollout_awake`).
"""

from __future__ import annotations

from typing import Any

MODULE = "verl.checkpoint_engine"


class CheckpointEngineManager:
    """Puts the inference engines to sleep before the trainer uses their GPUs, and wakes them with its new weights."""

    def __init__(self, config: Any, actor_wg: Any = None, replicas: Any = ()) -> None:
        self.config = config
        self.rollout_awake = True

    def sleep_replicas(self) -> None:
        """Called before the checkpoint is loaded, and when a batch is generated."""
        self.rollout_awake = False

    def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Called before the first rollout, and when the policy has been updated."""
        self.rollout_awake = True
        return {}


__all__ = ["MODULE", "CheckpointEngineManager"]
