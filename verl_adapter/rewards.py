"""Outcomes in verl's terms: a score, and `reward_extra_info` with the same keys for every sample.

verl takes the keys of one sample for all of them (trainer/ppo/ray_trainer.py, reward_loop.py). Where a failed sample
has no value it is None, which verl's validation metrics skip. `acc` is emitted only when a judge defines what is
correct, because verl counts a missing sample as `acc` 0.
"""

from __future__ import annotations

from typing import Any

from qreward_plugins import Outcome, RewardEngine

MISSING = "qreward/missing"
"""1.0 for a sample without a reward of its own: its score is a stand-in."""

IMPUTED = "qreward/imputed"
"""1.0 for a sample that trains on the mean of its group: one without a reward, or one that came too late to count."""


class ExtraInfo:
    """Turns outcomes of an engine into `reward_extra_info`: its facts under `qreward/`, and verl's own `acc`."""

    def __init__(self, engine: RewardEngine) -> None:
        self._facts = engine.facts()

    def of(self, outcome: Outcome, *, imputed: bool) -> dict[str, Any]:
        """The extra info of one outcome; `imputed`: its score is the mean of its group."""
        facts = self._facts.of(outcome).items()
        return {
            **{key if key == "acc" else f"qreward/{key}": value for key, value in facts},
            MISSING: float(outcome.reward is None),
            IMPUTED: float(imputed),
        }
