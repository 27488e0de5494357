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
    from .roll.engine import RollDraft
    from .roll.modules import roll_stand_in
    from .roll.protocol import RollDataProto
    from .roll.results import RollStep, RollValidation
    from .roll.trainer import FakeRollTrainer
    from .roll.trajectories import FakeTrajEnvManager
    from .slime.hooks import DynamicFilterOutput
    from .slime.modules import slime_stand_in
    from .slime.results import SlimeEvaluation, SlimeStep
    from .slime.samples import SlimeSample
    from .slime.trainer import FakeSlimeTrainer

_HOMES = {
    "DynamicFilterOutput": "slime.hooks",
    "FakeRollTrainer": "roll.trainer",
    "FakeSlimeTrainer": "slime.trainer",
    "FakeTrajEnvManager": "roll.trajectories",
    "RollDataProto": "roll.protocol",
    "RollDraft": "roll.engine",
    "RollStep": "roll.results",
    "RollValidation": "roll.results",
    "SlimeEvaluation": "slime.results",
    "SlimeSample": "slime.samples",
    "SlimeStep": "slime.results",
    "roll_stand_in": "roll.modules",
    "slime_stand_in": "slime.modules",
}

__all__ = [
    "DynamicFilterOutput",
    "FakeRollTrainer",
    "FakeSlimeTrainer",
    "FakeTrajEnvManager",
    "FaultKind",
    "Faults",
    "JudgeCall",
    "JudgeServer",
    "JudgeServerError",
    "JudgeServerProcess",
    "Latency",
    "Outage",
    "Report",
    "RollDataProto",
    "RollDraft",
    "RollStep",
    "RollValidation",
    "ScoreCall",
    "ServerLimits",
    "SlimeEvaluation",
    "SlimeSample",
    "SlimeStep",
    "Violation",
    "count_tokens",
    "overlap_score",
    "roll_stand_in",
    "serve_forever",
    "slime_stand_in",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
