"""Turns outcomes into ROLL's tensors and metrics, and reports failed samples to the rollout loop.

ROLL concatenates the results of the workers of all domains and breaks at a tensor that only some of them have, so these
are exactly ROLL's three. Training uses `response_level_rewards`. Validation and the difficulty mask use `scores`
(rlvr_pipeline.py: `val_correct` is the share of scores that equal 1), so they are 1.0 or 0.0 if a judge defines
correctness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qreward_plugins import BatchReport, Outcome, Scored
from qreward_plugins.adapters import METRICS, Facts, summary

FAILED = "qreward_failed"
"""The key of `meta_info` that holds the cause of every sample of the call, empty for the scored ones."""

DETAIL = "qreward_detail"
"""The key of `meta_info` that holds the detail of one failure; empty if no sample failed."""

ALL_AT_ONCE = "qreward_all_at_once"
"""The key of `meta_info` that asks the rollout loop to call again, with all responses of the prompt."""

ALL_THERE = "qreward_all_there"
"""The key of `meta_info` with which the rollout loop does so; there may be one response only."""

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


class Metrics:
    """Turns the outcomes of a call into ROLL's metrics.

    The suffix of a key sets how ROLL reduces it over the calls that have it (utils/functionals.py, `reduce_metrics`).
    In the streaming path every sample carries the metrics of its call, so each carries its share of a sum.
    """

    def __init__(self, facts: Facts, sources: Sequence[str]) -> None:
        self._facts = facts
        self._sources = tuple(sources)

    def facts(self, outcomes: Sequence[Outcome], data_sources: Sequence[Any]) -> list[dict[str, Any]]:
        """The facts of a call's samples."""
        return [self._facts.of(*each) for each in zip(outcomes, data_sources, strict=True)]

    def of(self, facts: Sequence[Mapping[str, Any]], *, streamed: bool) -> dict[str, float]:
        """The metrics of a call, from the facts of its samples."""
        totals = summary(facts)
        if not totals:
            return {}
        share = 1.0 / len(facts) if streamed else 1.0
        answered = Counter(source for fact in facts if not fact["cause"] for source in self._sources_of(fact["source"]))
        numbers = {
            **{metric.name: totals[metric.name] for metric in METRICS if metric.mean},
            **{f"{metric.name}_sum": share * totals[metric.name] for metric in METRICS if not metric.mean},
            "latency_s_mean": sum(fact["latency_s"] for fact in facts) / len(facts),
            **{name.replace("/", "_"): totals[name] for name in _REDUCED if name in totals},
            **{f"source/{name}_sum": share * answered[name] for name in self._sources},
            **{f"{name}_mean": value for name, value in totals.items() if name.startswith(_AVERAGED) or name == "acc"},
        }
        return {f"{_PREFIX}{name}": value for name, value in numbers.items()}

    @property
    def defines_correct(self) -> bool:
        """Whether some judge defines correctness."""
        return self._facts.defines_correct

    def _sources_of(self, source: str) -> Sequence[str]:
        """The sources of a verdict. A sum joins those of its parts by `+`."""
        return (source,) if source in self._sources else source.split("+")


class Blames:
    """Reports what each batch waited for, once, in the metrics of a call that ended with it.

    A worker does not know when a step ends, so ROLL reduces over the batches of a step: it keeps the largest number
    (`_max`). Samples that come one by one and are under way together are one batch (`RewardEngine.last_batch`), so a
    step that waits for its judge is one batch.
    """

    def __init__(self) -> None:
        self._reported: BatchReport | None = None

    def metrics(self, report: BatchReport | None) -> dict[str, float]:
        """Seconds by source and part of the batch that ended last; empty if it was reported before."""
        if report is None or report is self._reported:
            return {}
        self._reported = report
        return {f"qreward/{name}_max": seconds for name, seconds in report.metrics().items()}


class Validations:
    """Collects the samples of a validation for the metrics of the next training step, because ROLL logs no metrics of
    reward workers in a validation (rlvr_pipeline.py, `val`).
    """

    def __init__(self) -> None:
        self._step: Any = None
        self._facts: list[Mapping[str, Any]] = []
        self._failed = False
        self._metrics: dict[str, float] | None = {}

    def add(self, step: Any, facts: Sequence[Mapping[str, Any]]) -> bool:
        """Add the samples of a call in `step`'s validation. Return whether it has the first failed sample of this
        validation.
        """
        if step != self._step:
            self._step, self._facts, self._failed = step, [], False
        before, self._failed = self._failed, self._failed or any(fact["failed"] for fact in facts)
        self._facts += facts
        self._metrics = None
        return self._failed and not before

    def metrics(self) -> dict[str, float]:
        """The metrics of the last validation; empty before the first one. Each call of a step has them, and ROLL
        reduces equal numbers to themselves.

        If ROLL samples ahead, a step mixes rewards from before and after a validation, and its metric is the mean of
        both.
        """
        if self._metrics is None:
            self._metrics = {f"{_PREFIX}val/{name}": value for name, value in summary(self._facts).items()}
        return self._metrics
