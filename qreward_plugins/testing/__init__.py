"""For tests and demos: a judge server with limits, latency and faults, and fake trainers of verl, slime and ROLL."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .faults import FaultKind, Faults, Latency, PlayFault
from .judge_calls import JudgeCall, ScoreCall, count_tokens, overlap_score
from .judge_server import JudgeServer, JudgeServerError, JudgeServerProcess
from .limits import ServerLimits
from .protocols.services import RunCall, ran
from .report import Report, Violation

if TYPE_CHECKING:
    from .data_proto import RollDataProto, VerlDataProto
    from .roll.generation import RollDraft
    from .roll.trainer import FakeRollTrainer, RollStep, RollValidation, roll_stand_in
    from .slime.samples import DynamicFilterOutput, SlimeSample
    from .slime.trainer import FakeSlimeTrainer, SlimeEvaluation, SlimeStep, slime_stand_in
    from .verl.generation import VerlDraft, VerlOutput
    from .verl.modules import verl_stand_in
    from .verl.trainer import FakeVerlTrainer
    from .verl.trainers import VerlStep, VerlValidation

_NAMES = {
    "data_proto": "RollDataProto VerlDataProto",
    "roll.generation": "RollDraft",
    "roll.trainer": "FakeRollTrainer RollStep RollValidation roll_stand_in",
    "slime.samples": "DynamicFilterOutput SlimeSample",
    "slime.trainer": "FakeSlimeTrainer SlimeEvaluation SlimeStep slime_stand_in",
    "verl.generation": "VerlDraft VerlOutput",
    "verl.modules": "verl_stand_in",
    "verl.trainer": "FakeVerlTrainer",
    "verl.trainers": "VerlStep VerlValidation",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [
    "DynamicFilterOutput",
    "FakeRollTrainer",
    "FakeSlimeTrainer",
    "FakeVerlTrainer",
    "FaultKind",
    "Faults",
    "JudgeCall",
    "JudgeServer",
    "JudgeServerError",
    "JudgeServerProcess",
    "Latency",
    "PlayFault",
    "Report",
    "RollDataProto",
    "RollDraft",
    "RollStep",
    "RollValidation",
    "RunCall",
    "ScoreCall",
    "ServerLimits",
    "SlimeEvaluation",
    "SlimeSample",
    "SlimeStep",
    "VerlDataProto",
    "VerlDraft",
    "VerlOutput",
    "VerlStep",
    "VerlValidation",
    "Violation",
    "count_tokens",
    "overlap_score",
    "ran",
    "roll_stand_in",
    "slime_stand_in",
    "verl_stand_in",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    missing = None
    try:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        missing = error.name
    remedy = 'pip install "qreward-plugins[testing]"' if missing == "numpy" else f"pip install {missing}"
    raise ModuleNotFoundError(f"{name} needs {missing}, which is not installed; {remedy}", name=missing)
