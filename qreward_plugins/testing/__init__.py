"""Servers for tests and demos: a judge that behaves like a provider, with limits, latency and faults."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .calls import JudgeCall, count_tokens, overlap_score
from .faults import FaultKind, Faults, Outage
from .judge_process import JudgeServerProcess
from .judge_server import JudgeServer, JudgeServerError, serve_forever
from .latency import Latency
from .limits import ServerLimits
from .report import Report, Violation
from .scores import ScoreCall

if TYPE_CHECKING:
    from .slime.hooks import DynamicFilterOutput
    from .slime.modules import slime_stand_in
    from .slime.results import SlimeEvaluation, SlimeStep
    from .slime.samples import SlimeSample
    from .slime.trainer import FakeSlimeTrainer

_HOMES = {
    "DynamicFilterOutput": "slime.hooks",
    "FakeSlimeTrainer": "slime.trainer",
    "SlimeEvaluation": "slime.results",
    "SlimeSample": "slime.samples",
    "SlimeStep": "slime.results",
    "slime_stand_in": "slime.modules",
}

__all__ = [
    "DynamicFilterOutput",
    "FakeSlimeTrainer",
    "FaultKind",
    "Faults",
    "JudgeCall",
    "JudgeServer",
    "JudgeServerError",
    "JudgeServerProcess",
    "Latency",
    "Outage",
    "Report",
    "ScoreCall",
    "ServerLimits",
    "SlimeEvaluation",
    "SlimeSample",
    "SlimeStep",
    "Violation",
    "count_tokens",
    "overlap_score",
    "serve_forever",
    "slime_stand_in",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
