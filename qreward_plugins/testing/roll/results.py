"""The results of a step and a validation of the fake ROLL trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .protocol import RollDataProto
from .scheduler import RollPrompt


@dataclass(frozen=True)
class _Result:
    """Lists are in the order of the rows of `batch`. `metrics` are the logged metrics."""

    global_step: int
    batch: RollDataProto
    responses: list[str]
    metrics: dict[str, Any]

    @property
    def scores(self) -> list[float]:
        return [float(number) for number in self.batch.batch["scores"]]

    @property
    def rewards(self) -> list[float]:
        return [float(number) for number in self.batch.batch["response_level_rewards"]]

    def column(self, name: str) -> list[Any]:
        """A column of the data set, such as `id`, `domain` or `ground_truth`."""
        return list(self.batch.non_tensor_batch[name])


@dataclass(frozen=True)
class RollValidation(_Result):
    """One validation. `val_correct` is the share of scores that are exactly 1, by tag, and of `all`."""

    val_correct: dict[str, float]


@dataclass(frozen=True)
class RollStep(_Result):
    """One step, up to the training batch. Lists are in the order of its rows.

    `batch` holds ROLL's tensors, with `advantages` and `final_response_mask` (B, L - 1). `raw_rewards` are
    `response_level_rewards` from the workers and the rollout loop, `rewards` the same normalised, `advantages` their
    mean over the trained tokens of a response, or None if none is trained. `metrics` are the logged metrics.

    `dropped` are prompts for which the rollout loop returned None. `reward_calls` counts the calls of
    `compute_rewards`.
    """

    raw_rewards: list[float]
    dropped: list[RollPrompt]
    reward_calls: int

    @property
    def trained_tokens(self) -> list[int]:
        """For each response its tokens in the loss. If there is none at all, ROLL skips the step."""
        return [int(count) for count in self._array("final_response_mask").sum(-1)]

    @property
    def advantages(self) -> list[float | None]:
        """NaN if any token is NaN, trained or not, because ROLL multiplies with the mask."""
        rows = zip(self._array("advantages"), self._array("final_response_mask") > 0, strict=True)
        return [
            float(row[kept].mean()) if kept.any() else None if np.isfinite(row).all() else np.nan for row, kept in rows
        ]

    @property
    def poisoned(self) -> bool:
        """Whether any advantage is not finite. Such a step ruins the policy, and ROLL does not detect it."""
        return not bool(np.isfinite(self._array("advantages")).all())

    def _array(self, name: str) -> Any:
        return np.asarray(self.batch.batch[name])
