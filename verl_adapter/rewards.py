"""Outcomes in verl's terms: a score, and `reward_extra_info` with the same keys for every sample.

verl takes the keys of one sample for all of them (trainer/ppo/ray_trainer.py, reward_loop.py), so a key that is there
only when a judge answered breaks a run hours later. Every key is therefore always there; where a failed sample has no
value it is None, which verl's validation metrics skip. `acc` is emitted only when a judge defines what is correct,
because verl counts a missing sample as `acc` 0.
"""

from __future__ import annotations

from typing import Any

from qreward_plugins import Outcome, RewardEngine, Scored


class ExtraInfo:
    """Turns outcomes into `reward_extra_info`.

    The keys are those of all judges of the configuration together. A function judge that does not name its components
    adds those that it returns as they come, and keeps them from then on.
    """

    def __init__(self, engine: RewardEngine) -> None:
        names = [name for judge in engine.judges.values() for name in judge.component_names()]
        self._components: dict[str, None] = dict.fromkeys(names)
        self._defines_correct = any(judge.correct_at is not None for judge in engine.config.judges.values())

    def of(self, outcome: Outcome) -> dict[str, Any]:
        """The extra info of one outcome."""
        scored = isinstance(outcome, Scored)
        told = outcome.verdict if isinstance(outcome, Scored) else outcome
        components = outcome.verdict.components if isinstance(outcome, Scored) else {}
        correct = outcome.verdict.correct if isinstance(outcome, Scored) else None
        self._components.update(dict.fromkeys(components))
        self._defines_correct = self._defines_correct or correct is not None
        info: dict[str, Any] = {
            "qreward/failed": 0.0 if scored else 1.0,
            "qreward/cause": "" if isinstance(outcome, Scored) else f"{outcome.cause.value}/{outcome.reason}",
            "qreward/source": told.source,
            "qreward/judge": told.judge,
            "qreward/attempts": float(told.attempts),
            "qreward/latency_s": float(told.latency_s),
            "qreward/tokens": float(told.usage.total_tokens),
            "qreward/cost_usd": float(told.cost_usd),
            "qreward/cached": float(isinstance(outcome, Scored) and outcome.verdict.cached),
        }
        for name in self._components:
            info[f"qreward/score/{name}"] = float(components[name]) if name in components else None
        if self._defines_correct:
            info["acc"] = float(bool(correct)) if scored else 0.0
        return info
