"""Turns outcomes into ROLL's tensors and metrics, and reports failed samples to the rollout loop.

ROLL concatenates the results of the workers of all domains and breaks at a tensor that only some of them have, so these
are exactly ROLL's three. Training uses `response_level_rewards`. Validation and the difficulty mask use `scores`
(rlvr_pipeline.py: `val_correct` is the share of scores that equal 1), so they are 1.0 or 0.0 if a judge defines
correctness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from qreward_plugins import Outcome, Scored
from qreward_plugins.adapters import METRICS, summary

FAILED = "qreward_failed"
"""The key of `meta_info` that holds the cause of every sample of the call, empty for the scored ones."""

DETAIL = "qreward_detail"
"""The key of `meta_info` that holds the detail of one failure; empty if no sample failed."""

GROUPS = "qreward_groups"
"""The key of `meta_info` that holds the domain's `groups`, for the rollout loop in another process."""


def tensors(
    width: int, rewards: Sequence[float], outcomes: Sequence[Outcome], *, right_or_wrong: bool
) -> dict[str, torch.Tensor]:
    """The tensors of a reward worker: `token_level_rewards` (B, width) of zeros, `response_level_rewards` and `scores`
    (B,), in 32 bits.

    `right_or_wrong`: ROLL counts the scores that equal 1. Then a failed sample's score is 0.0 instead of the stand-in
    that its reward is.
    """
    scores = [_score(reward, outcome, right_or_wrong) for reward, outcome in zip(rewards, outcomes, strict=True)]
    return {
        "token_level_rewards": torch.zeros(len(rewards), width, dtype=torch.float32),
        "response_level_rewards": torch.tensor(rewards, dtype=torch.float32),
        "scores": torch.tensor(scores, dtype=torch.float32),
    }


def _score(reward: float, outcome: Outcome, right_or_wrong: bool) -> float:
    verdict = outcome.verdict if isinstance(outcome, Scored) else None
    if verdict is not None and verdict.correct is not None:
        return float(verdict.correct)
    judged = verdict is not None and verdict.basis == "judged"
    return 0.0 if right_or_wrong and not judged else reward


_PREFIX = "qreward/"

_REDUCED = (
    *(f"reward/{of}" for of in ("mean", "std", "min", "p50", "max")),
    "latency_s/p50",
    "latency_s/p99",
    "latency_s/max",
)
"""Metrics whose names end with how ROLL reduces them."""

_AVERAGED = ("score/", "data/")
"""How the names of metrics begin that are means over the samples that have them."""


def metrics_of(facts: Sequence[Mapping[str, Any]], sources: Collection[str], *, streamed: bool) -> dict[str, float]:
    """ROLL's metrics of a call, from the facts of its samples; `sources` are the names of all sources.

    The suffix of a key sets how ROLL reduces it over the calls that have it (utils/functionals.py, `reduce_metrics`).
    In the streaming path every sample carries the metrics of its call, so each carries its share of a sum.
    """
    totals = summary(facts)
    if not totals:
        return {}
    share = 1.0 / len(facts) if streamed else 1.0
    # The sources of a sum's verdict are joined by `+`.
    answered = Counter(
        source
        for fact in facts
        if not fact["cause"]
        for source in ([fact["source"]] if fact["source"] in sources else fact["source"].split("+"))
    )
    numbers = {
        **{metric.name: totals[metric.name] for metric in METRICS if metric.mean},
        **{f"{metric.name}_sum": share * totals[metric.name] for metric in METRICS if not metric.mean},
        "latency_s_mean": sum(fact["latency_s"] for fact in facts) / len(facts),
        **{name.replace("/", "_"): totals[name] for name in _REDUCED if name in totals},
        **{f"source/{name}_sum": share * answered[name] for name in sources},
        **{f"{name}_mean": value for name, value in totals.items() if name.startswith(_AVERAGED) or name == "acc"},
    }
    return {f"{_PREFIX}{name}": value for name, value in numbers.items()}


class Validations:
    """Collects the samples of a validation for the metrics of the next training step, because ROLL logs no metrics of
    reward workers in a validation (rlvr_pipeline.py, `val`).
    """

    def __init__(self) -> None:
        self._step: Any = None
        self._facts: list[Mapping[str, Any]] = []
        self._metrics: dict[str, float] | None = {}

    def add(self, step: Any, facts: Sequence[Mapping[str, Any]]) -> None:
        """Add the samples of a call in `step`'s validation."""
        if step != self._step:
            self._step, self._facts = step, []
        self._facts += facts
        self._metrics = None

    def metrics(self) -> dict[str, float]:
        """The metrics of the last validation; empty before the first one. Each call of a step has them, and ROLL
        reduces equal numbers to themselves.

        If ROLL samples ahead, a step mixes rewards from before and after a validation, and its metric is the mean of
        both.
        """
        if self._metrics is None:
            self._metrics = {f"{_PREFIX}val/{name}": value for name, value in summary(self._facts).items()}
        return self._metrics
