"""Predicts the duration and the cost of a training step: it simulates the configuration in virtual time.

A rehearsal runs the production engine over simulated servers. So a plan covers windows that are spent at once, hedges,
retries and the tail of a batch, which a formula does not. Facts that are not in the configuration (latencies, lengths
of rollouts) are assumed, and the plan lists every assumption.
"""

from __future__ import annotations

from .advice import Advice, Bottleneck, Wait
from .against import Compared, Step, compare, errors_of, read_steps, recorded_shares
from .picture import Bar, Timeline, draw_timeline
from .prediction import Plan, SourceUse, Spread, plan
from .rollouts import Lengths, parse_lengths
from .setting import Assumptions, RequestTime, parse_data_source, parse_latency

__all__ = [
    "Advice",
    "Assumptions",
    "Bar",
    "Bottleneck",
    "Compared",
    "Lengths",
    "Plan",
    "RequestTime",
    "SourceUse",
    "Spread",
    "Step",
    "Timeline",
    "Wait",
    "compare",
    "draw_timeline",
    "errors_of",
    "parse_data_source",
    "parse_latency",
    "parse_lengths",
    "plan",
    "read_steps",
    "recorded_shares",
]
