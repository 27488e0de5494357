"""The reward layer of RL post-training: rollouts go in, outcomes come out, at the speed the sources' limits allow.

The names below are the public surface. They load on first use, because importing this package happens in every process
of a training run and must cost next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config, load_config
    from .engine import RewardEngine
    from .errors import (
        ConfigurationError,
        EngineError,
        InputError,
        InvalidReply,
        JournalError,
        JudgeUnavailable,
        Mistake,
        PermanentError,
        QRewardError,
        RewardMissing,
        SampleRefused,
        SourceError,
        SourceUnusable,
        Throttled,
        TransientError,
    )
    from .groups import GroupGate, group_means
    from .portal import EnginePortal, process_portal
    from .samples import Cause, Failed, Message, Outcome, Sample, Scored, Split, Verdict
    from .scheduling import Cutoff
    from .spent import Spent, Usage
    from .telemetry import BatchReport, EngineStatistics, Part, SourceStatistics

__version__ = "0.1.0"

_HOMES = {
    "BatchReport": "telemetry",
    "Cause": "samples",
    "Config": "config",
    "ConfigurationError": "errors",
    "Cutoff": "scheduling",
    "EngineError": "errors",
    "EnginePortal": "portal",
    "EngineStatistics": "telemetry",
    "Failed": "samples",
    "GroupGate": "groups",
    "InputError": "errors",
    "InvalidReply": "errors",
    "InvalidVerdict": "errors",  # its former name
    "JournalError": "errors",
    "JudgeUnavailable": "errors",
    "Message": "samples",
    "Mistake": "errors",
    "Outcome": "samples",
    "Part": "telemetry",
    "PermanentError": "errors",
    "QRewardError": "errors",
    "RewardEngine": "engine",
    "RewardMissing": "errors",
    "Sample": "samples",
    "SampleRefused": "errors",
    "Scored": "samples",
    "SourceError": "errors",
    "SourceStatistics": "telemetry",
    "SourceUnusable": "errors",
    "Spent": "spent",
    "Split": "samples",
    "Throttled": "errors",
    "TransientError": "errors",
    "Usage": "spent",
    "Verdict": "samples",
    "group_means": "groups",
    "load_config": "config",
    "process_portal": "portal",
}

__all__ = [
    "BatchReport",
    "Cause",
    "Config",
    "ConfigurationError",
    "Cutoff",
    "EngineError",
    "EnginePortal",
    "EngineStatistics",
    "Failed",
    "GroupGate",
    "InputError",
    "InvalidReply",
    "JournalError",
    "JudgeUnavailable",
    "Message",
    "Mistake",
    "Outcome",
    "Part",
    "PermanentError",
    "QRewardError",
    "RewardEngine",
    "RewardMissing",
    "Sample",
    "SampleRefused",
    "Scored",
    "SourceError",
    "SourceStatistics",
    "SourceUnusable",
    "Spent",
    "Split",
    "Throttled",
    "TransientError",
    "Usage",
    "Verdict",
    "__version__",
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
