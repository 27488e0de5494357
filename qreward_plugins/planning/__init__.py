"""What a training step will cost before it is run: the configuration, rehearsed in virtual time.

The rehearsal is the production engine over simulated servers, so that a plan knows whatever the scheduler knows:
windows that are spent at once, hedges, retries, the tail of a batch. A formula knows none of that. What a configuration
cannot tell (how long an answer takes, how long rollouts are) is assumed, and every assumption is said.
"""

from __future__ import annotations

from .advice import Advice
from .assumptions import Assumptions, parse_data_source, parse_latency
from .bottleneck import Bottleneck, Wait
from .forecast import Plan, SourceUse, Spread, plan
from .lengths import Lengths, parse_lengths
from .picture import draw_timeline
from .timeline import Bar, Timeline

__all__ = [
    "Advice",
    "Assumptions",
    "Bar",
    "Bottleneck",
    "Lengths",
    "Plan",
    "SourceUse",
    "Spread",
    "Timeline",
    "Wait",
    "draw_timeline",
    "parse_data_source",
    "parse_latency",
    "parse_lengths",
    "plan",
]
