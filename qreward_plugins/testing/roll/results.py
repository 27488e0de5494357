"""The results of a step and a validation of the fake ROLL trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .protocol import RollDataProto
from .replay import RollItem
from .scheduler import RollPrompt


@dataclass(frozen=True)
class RollStep:
    """One step, up to the training batch. All lists are in the order of the rows of `batch`.

    `batch` holds ROLL's tensors, with `advantages` and `final_response_mask` (B, L - 1). `raw_rewards` are
    `response_level_rewards` from the workers and the rollout loop, `rewards` the same normalised, `advantages` their
    mean over the trained tokens of a response, or None if none is trained. `metrics` are the logged metrics.

    `dropped` are prompts for which the rollout loop returned None, `aborted` prompts that became too old while running,
    `surplus` unused finished responses (`is_use_additional_prompts`). `reward_calls` counts the calls of
    `compute_rewards`; at most `rewards_pending_max` of the streaming path ran at once. `skipped`: there is nothing to
    train, so ROLL skips the step.
    """

    global_step: int
    batch: RollDataProto
    responses: list[str]
    raw_rewards: list[float]
    metrics: dict[str, Any]
    dropped: list[RollPrompt] = field(default_factory=list)
    aborted: list[RollPrompt] = field(default_factory=list)
    surplus: list[RollItem] = field(default_factory=list)
    reward_calls: int = 0
    rewards_pending_max: int = 0

    @property
    def rewards(self) -> list[float]:
        return _listed(self.batch, "response_level_rewards")

    @property
    def scores(self) -> list[float]:
        return _listed(self.batch, "scores")

    @property
    def trained_tokens(self) -> list[int]:
        """For each response its tokens in the loss."""
        return [int(count) for count in self.batch.batch["final_response_mask"].sum(-1)]

    @property
    def advantages(self) -> list[float | None]:
        """NaN if any token is NaN, trained or not, because ROLL multiplies with the mask."""
        values, mask = self.batch.batch["advantages"], self.batch.batch["final_response_mask"].bool()
        return [_mean_where(row, kept) for row, kept in zip(values, mask, strict=True)]

    @property
    def poisoned(self) -> bool:
        """Whether any advantage is not finite. Such a step ruins the policy, and ROLL does not detect it."""
        return not bool(self.batch.batch["advantages"].isfinite().all())

    @property
    def skipped(self) -> bool:
        return not any(self.trained_tokens)

    def column(self, name: str) -> list[Any]:
        """A column of the data set, such as `id`, `domain` or `ground_truth`."""
        return list(self.batch.non_tensor_batch[name])


@dataclass(frozen=True)
class RollValidation:
    """One validation. `val_correct` is the share of scores that are exactly 1, by tag, and of `all`."""

    global_step: int
    batch: RollDataProto
    responses: list[str]
    val_correct: dict[str, float]
    metrics: dict[str, Any]

    @property
    def scores(self) -> list[float]:
        return _listed(self.batch, "scores")

    @property
    def rewards(self) -> list[float]:
        return _listed(self.batch, "response_level_rewards")

    def column(self, name: str) -> list[Any]:
        """A column of the data set, such as `id`, `tag` or `ground_truth`."""
        return list(self.batch.non_tensor_batch[name])


def _listed(batch: RollDataProto, name: str) -> list[float]:
    return [float(number) for number in batch.batch[name]]


def _mean_where(values: torch.Tensor, kept: torch.Tensor) -> float | None:
    if not kept.any():
        return None if values.isfinite().all() else float("nan")
    return values[kept].mean().item()
