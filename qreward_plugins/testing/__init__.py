"""Servers for tests and demos: a judge that behaves like a provider, with limits, latency and faults."""

from __future__ import annotations

from .calls import JudgeCall, count_tokens, overlap_score
from .faults import FaultKind, Faults, Outage
from .judge_process import JudgeServerProcess
from .judge_server import JudgeServer, JudgeServerError, serve_forever
from .latency import Latency
from .limits import ServerLimits
from .report import Report, Violation

__all__ = [
    "FaultKind",
    "Faults",
    "JudgeCall",
    "JudgeServer",
    "JudgeServerError",
    "JudgeServerProcess",
    "Latency",
    "Outage",
    "Report",
    "ServerLimits",
    "Violation",
    "count_tokens",
    "overlap_score",
    "serve_forever",
]
