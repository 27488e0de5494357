"""The reward layer of RL post-training: rollouts go in, outcomes come out, at the speed the sources' limits allow.

The names below are the public surface. They load on first use, because importing this package happens in every process
of a training run and must cost next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .acceleration import FunctionStatistics, accelerate
    from .adapters.groups import GroupGate, group_means
    from .config import Config, load_config
    from .engine import RewardEngine
    from .engine.portal import EnginePortal
    from .engine.process_portals import process_portal
    from .engine.texts import TextAnswer
    from .errors import (
        BudgetSpent,
        CircuitOpen,
        ConfigurationError,
        EngineError,
        FunctionTimeout,
        InputError,
        InvalidReply,
        JournalError,
        JudgeUnavailable,
        Mistake,
        PermanentError,
        QRewardError,
        ReplicasNotChanged,
        ReplicasNotStarted,
        RewardMissing,
        RewardServerError,
        SampleRefused,
        SourceError,
        SourceUnusable,
        TextFailed,
        Throttled,
        TransientError,
    )
    from .observers import (
        AttemptEnded,
        AttemptStarted,
        BatchEnded,
        CallEnded,
        EngineClosed,
        EngineStatistics,
        Event,
        LateVerdict,
        Observer,
        ReplicaChanged,
        RequestBatchSent,
        SampleDropped,
        SampleEnded,
        SampleSubmitted,
        SourceStateChanged,
        SourceStatistics,
    )
    from .observers.batch_report import BatchReport, Part
    from .samples import Cause, Failed, Message, Outcome, Sample, Scored, Split, Verdict
    from .samples.spent import Spent, Usage
    from .scheduling import Cutoff
    from .sources.replica_set import WeightTransfer

__version__ = "0.2.0"

# `InvalidVerdict` is the former name of `InvalidReply`.
_NAMES = {
    "acceleration": "FunctionStatistics accelerate",
    "adapters.groups": "GroupGate group_means",
    "config": "Config load_config",
    "engine": "RewardEngine",
    "engine.portal": "EnginePortal",
    "engine.process_portals": "process_portal",
    "engine.texts": "TextAnswer",
    "errors": "BudgetSpent CircuitOpen ConfigurationError EngineError FunctionTimeout InputError InvalidReply "
    "JournalError JudgeUnavailable Mistake PermanentError QRewardError ReplicasNotChanged ReplicasNotStarted "
    "RewardMissing RewardServerError SampleRefused SourceError SourceUnusable TextFailed Throttled "
    "TransientError InvalidVerdict",
    "observers": "AttemptEnded AttemptStarted BatchEnded CallEnded EngineClosed EngineStatistics Event LateVerdict "
    "Observer ReplicaChanged RequestBatchSent SampleDropped SampleEnded SampleSubmitted "
    "SourceStateChanged SourceStatistics",
    "observers.batch_report": "BatchReport Part",
    "samples": "Cause Failed Message Outcome Sample Scored Split Verdict",
    "samples.spent": "Spent Usage",
    "scheduling": "Cutoff",
    "sources.replica_set": "WeightTransfer",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AttemptEnded",
    "AttemptStarted",
    "BatchEnded",
    "BatchReport",
    "BudgetSpent",
    "CallEnded",
    "Cause",
    "CircuitOpen",
    "Config",
    "ConfigurationError",
    "Cutoff",
    "EngineClosed",
    "EngineError",
    "EnginePortal",
    "EngineStatistics",
    "Event",
    "Failed",
    "FunctionStatistics",
    "FunctionTimeout",
    "GroupGate",
    "InputError",
    "InvalidReply",
    "JournalError",
    "JudgeUnavailable",
    "LateVerdict",
    "Message",
    "Mistake",
    "Observer",
    "Outcome",
    "Part",
    "PermanentError",
    "QRewardError",
    "ReplicaChanged",
    "ReplicasNotChanged",
    "ReplicasNotStarted",
    "RequestBatchSent",
    "RewardEngine",
    "RewardMissing",
    "RewardServerError",
    "Sample",
    "SampleDropped",
    "SampleEnded",
    "SampleRefused",
    "SampleSubmitted",
    "Scored",
    "SourceError",
    "SourceStateChanged",
    "SourceStatistics",
    "SourceUnusable",
    "Spent",
    "Split",
    "TextAnswer",
    "TextFailed",
    "Throttled",
    "TransientError",
    "Usage",
    "Verdict",
    "WeightTransfer",
    "__version__",
    "accelerate",
    "group_means",
    "load_config",
    "process_portal",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
