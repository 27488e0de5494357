"""The results of a rollout and an evaluation of the fake slime trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .rollout import DroppedGroup, Group
from .samples import SlimeSample


@dataclass
class SlimeRolloutOutput:
    """The result of slime's rollout function: groups, and metrics to log."""

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class SlimeEvalOutput:
    """The result of slime's rollout function for an evaluation, by data set."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass(frozen=True)
class SlimeStep:
    """One rollout, from the samples to the trainer's batch. Lists for each sample are in the order of `samples`.

    `groups` is the batch that the rollout function returned, `samples` the same flattened. `train_data` is slime's
    batch for the trainer. `token_advantages` has a number for each token, `advantages` their mean over the trained
    tokens, or None if none is trained; `advantages.py` says what is assumed of the model. Both are empty if a custom
    conversion returns no rewards or no loss masks.

    `metrics` are the logged metrics. `dropped` are the groups that the dynamic filter refused. `aborted` are the groups
    that were running when the batch was full; they are discarded, or put back into the data source with partial
    rollout. `surplus` are groups that the filter kept when the batch was full. `lost_errors` are exceptions of rewards
    after the batch was full, which slime drops without a message.

    `reward_calls` counts the calls of the reward function, `rewards_pending_max` how many ran at the same time.
    """

    rollout_id: int
    groups: list[Group]
    samples: list[SlimeSample]
    train_data: dict[str, Any]
    token_advantages: list[list[float]]
    advantages: list[float | None]
    metrics: dict[str, Any]
    dropped: list[DroppedGroup]
    aborted: list[Group]
    surplus: list[Group]
    lost_errors: list[BaseException]
    reward_calls: int
    rewards_pending_max: int

    @property
    def raw_rewards(self) -> list[Any]:
        """The rewards logged as `rollout/raw_reward`."""
        return list(self.train_data["raw_reward"])

    @property
    def rewards(self) -> list[Any]:
        """The rewards that train: post-processed."""
        return list(self.train_data["rewards"])

    @property
    def loss_masks(self) -> list[list[int]]:
        """One 0 or 1 for each token of the response."""
        return list(self.train_data["loss_masks"])

    @property
    def rollout_mask_sums(self) -> list[int]:
        """For each sample, the trained tokens of its generation."""
        return list(self.train_data["rollout_mask_sums"])


@dataclass(frozen=True)
class SlimeEvaluation:
    """One evaluation. `data` is slime's, after the log hook: rewards, truncated and samples for each data set."""

    rollout_id: int
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any]

    @property
    def rewards(self) -> dict[str, list[Any]]:
        """The rewards that are averaged, by data set."""
        return {name: list(results["rewards"]) for name, results in self.data.items()}

    @property
    def samples(self) -> dict[str, list[SlimeSample]]:
        """The samples, by data set."""
        return {name: list(results["samples"]) for name, results in self.data.items()}
