"""Predicts the duration and the cost of a training step: it simulates the configuration in virtual time.

A rehearsal runs the production engine over simulated servers. So a plan covers windows that are spent at once, hedges,
retries and the tail of a batch, which a formula does not. Facts that are not in the configuration (latencies, lengths
of rollouts) are assumed, and the plan lists every assumption.
"""

from __future__ import annotations

from .prediction import Plan, plan
from .rollouts import Lengths
from .setting import Assumptions

__all__ = ["Assumptions", "Lengths", "Plan", "plan"]
