"""verl's replay buffer, which checks more often whether a step's rewards are complete.

The trainer polls every two seconds, which is short for a step on GPUs and most of a step here. The interval is an
argument of the buffer that no config key sets, so this subclass reads it from `trainer.v1.sampler.sampler_kwargs`.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class PromptReplayBuffer(ReplayBuffer):  # type: ignore[misc]  # verl is not typed
    """A `ReplayBuffer` with `sampler_kwargs.poll_interval_s`, in seconds."""

    def __init__(self, *, sampler_kwargs: Any, **kwargs: Any) -> None:
        super().__init__(sampler_kwargs=sampler_kwargs, poll_interval=float(sampler_kwargs.poll_interval_s), **kwargs)
