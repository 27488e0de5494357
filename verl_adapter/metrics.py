"""What the group barrier was told of all reward workers, as metrics for verl's tracker."""

from __future__ import annotations

import functools
import logging
from contextlib import suppress
from typing import Any

from qreward_plugins.adapters import barrier_actor

_log = logging.getLogger("verl_adapter")

_ANSWER_S = 10.0


class OutcomeMetrics:
    """Turns the counts of the group barrier's actor into metrics of what was scored since the last call."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._reported: tuple[str, dict[str, int]] = ("", {})
        self._waited: tuple[str, int] = ("", 0)

    def since_last(self) -> dict[str, float]:
        """Metrics of what was scored since the last call; empty if nothing was, or if the actor does not answer."""
        answer = self._read()
        if answer is None:
            return {}
        before = self._reported[1] if self._reported[0] == answer[0] else {}
        self._reported = answer
        new = {key: count - before.get(key, 0) for key, count in answer[1].items()}
        metrics: dict[str, float] = {}
        if new.get("train/samples"):
            metrics |= {f"qreward/{name}": seconds for name, seconds in self._read_waited().items()}
        for split, prefix in (("train", "qreward/"), ("val", "qreward/val/")):
            samples = new.get(f"{split}/samples", 0)
            if not samples:
                continue
            metrics[f"{prefix}samples"] = float(samples)
            metrics[f"{prefix}failed_rate"] = new.get(f"{split}/failed", 0) / samples
            for cause in ("infra", "verdict", "policy"):
                metrics[f"{prefix}failed/{cause}"] = float(new.get(f"{split}/failed/{cause}", 0))
            metrics[f"{prefix}cut_rate"] = new.get(f"{split}/cut", 0) / samples
            metrics[f"{prefix}floor_rate"] = new.get(f"{split}/floor", 0) / samples
            if split == "train":
                metrics[f"{prefix}imputed_rate"] = new.get(f"{split}/imputed", 0) / samples
        return metrics

    def may_have_imputed(self) -> bool:
        """Whether some sample of this run may train on the mean of its group.

        True also if the actor does not answer, or was restarted and so lost its counts.
        """
        answer = self._read()
        if answer is None or self._reported[0] not in ("", answer[0]):
            return True
        return bool(answer[1].get("train/imputed"))

    def _read_waited(self) -> dict[str, float]:
        """What the longest batch since the last call waited for; empty without one, or if the actor does not answer."""
        answer = self._answer("waited", *self._waited)
        if answer is None:
            return {}
        start, number, parts = answer
        self._waited = (start, number)
        return dict(parts)

    def _read(self) -> tuple[str, dict[str, int]] | None:
        """The actor's start and its counts; None if it does not answer."""
        answer = self._answer("counts")
        return None if answer is None else (answer[0], answer[1])

    def _answer(self, method: str, *arguments: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=_ANSWER_S)
        except Exception as error:
            warn_once(f"no metrics of rewards: the group barrier does not answer ({type(error).__name__})")
            with suppress(Exception):
                self._actor = barrier_actor()
            return None


@functools.lru_cache(maxsize=32)
def warn_once(text: str) -> None:
    """Log a warning, the first time that it is given."""
    _log.warning("%s", text)
