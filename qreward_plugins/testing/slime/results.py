"""What a rollout and an evaluation of the fake slime trainer leave for a test to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .rollout import DroppedGroup, Group
from .samples import SlimeSample


@dataclass
class SlimeRolloutOutput:
    """What slime's rollout function returns: groups, and metrics to log."""

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class SlimeEvalOutput:
    """What slime's rollout function returns for an evaluation, by name of the data set."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass(frozen=True)
class SlimeStep:
    """One rollout, from the samples to what the trainer gets. All lists without a unit are in the order of `samples`.

    `groups` is the batch as the rollout function returned it, `samples` the same flattened. `train_data` is slime's
    batch for the trainer. `token_advantages` has a number for each token, `advantages` their mean over the trained
    tokens, None where none is trained: see `slime_advantages` for what is assumed of the model. Both are empty if a
    custom conversion returns no rewards or no loss masks.

    `metrics` is what would be in the log. `dropped` are the groups that the dynamic filter refused. `aborted` are those
    that were under way when the batch was full: thrown away, or put back into the data source with partial rollout.
    `surplus` are groups that were kept when there was no room any more. `lost_errors` are exceptions of rewards that
    were awaited after the batch was full and that slime loses without a word.

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
        """What is logged as `rollout/raw_reward`."""
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
        """For each sample the trained tokens of the generation that it came from."""
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
