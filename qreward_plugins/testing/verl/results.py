"""What a step and a validation of the fake verl trainer leave for a test to look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .data import VerlDataProto


@dataclass(frozen=True)
class VerlStep:
    """One step, up to what would train. All lists are in the order of the rows of `batch`.

    `batch` holds verl's tensors: `responses`, `response_mask`, `token_level_scores`, `token_level_rewards`,
    `advantages` and `returns` of shape (rows, response length). `metrics` is what the tracker gets.
    `extra_info`: what the reward manager returned for each row. `sessions`: which response of its prompt a row is.

    V1 only: `dropped` are trajectories whose reward manager raised, as (uid, session, error); `evicted` the uids of
    groups that were replaced.
    """

    global_step: int
    batch: VerlDataProto
    responses: list[str]
    uids: list[str]
    sessions: list[int]
    extra_info: list[dict[str, Any]]
    metrics: dict[str, Any]
    dropped: list[tuple[str, int, BaseException]] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)

    @property
    def scores(self) -> list[float]:
        """The score of each row."""
        return [float(value) for value in np.asarray(self.batch.batch["token_level_scores"]).sum(axis=-1)]

    @property
    def advantages(self) -> list[float | None]:
        """The advantage of each row: that of its last trained token; None where none is trained."""
        advantages, mask = (np.asarray(self.batch.batch[name]) for name in ("advantages", "response_mask"))
        trained = [np.flatnonzero(row) for row in mask]
        return [float(row[there[-1]]) if len(there) else None for row, there in zip(advantages, trained, strict=True)]

    @property
    def poisoned(self) -> bool:
        """Whether a trained token has an advantage that is no finite number: its optimizer step would be lost."""
        mask = np.asarray(self.batch.batch["response_mask"]).astype(bool)
        return not bool(np.isfinite(np.asarray(self.batch.batch["advantages"])[mask]).all())


@dataclass(frozen=True)
class VerlValidation:
    """One validation. `scores` and `extra_info` are by sample, `metrics` is what the tracker gets."""

    global_step: int
    metrics: dict[str, Any]
    responses: list[str]
    scores: list[float]
    uids: list[str]
    extra_info: dict[str, list[Any]]
