"""The reward layer of RL post-training: rollouts go in, outcomes come out, at the speed the sources' limits allow.

The names below are the public surface. They load on first use, because importing this package happens in every process
of a training run and must cost next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .acceleration import FunctionStatistics as FunctionStatistics
    from .acceleration import accelerate as accelerate
    from .adapters.groups import GroupGate as GroupGate
    from .adapters.groups import group_means as group_means
    from .config import Config as Config
    from .config import load_config as load_config
    from .engine import RewardEngine as RewardEngine
    from .engine.portal import EnginePortal as EnginePortal
    from .engine.process_portals import process_portal as process_portal
    from .engine.texts import TextAnswer as TextAnswer
    from .errors import BudgetSpent as BudgetSpent
    from .errors import CircuitOpen as CircuitOpen
    from .errors import ConfigurationError as ConfigurationError
    from .errors import EngineError as EngineError
    from .errors import FunctionTimeout as FunctionTimeout
    from .errors import InputError as InputError
    from .errors import InvalidReply as InvalidReply
    from .errors import JournalError as JournalError
    from .errors import JudgeUnavailable as JudgeUnavailable
    from .errors import Mistake as Mistake
    from .errors import PermanentError as PermanentError
    from .errors import QRewardError as QRewardError
    from .errors import ReplicasNotChanged as ReplicasNotChanged
    from .errors import ReplicasNotStarted as ReplicasNotStarted
    from .errors import RewardMissing as RewardMissing
    from .errors import RewardServerError as RewardServerError
    from .errors import SampleRefused as SampleRefused
    from .errors import SourceError as SourceError
    from .errors import SourceUnusable as SourceUnusable
    from .errors import TextFailed as TextFailed
    from .errors import Throttled as Throttled
    from .errors import TransientError as TransientError
    from .observers import AttemptEnded as AttemptEnded
    from .observers import AttemptStarted as AttemptStarted
    from .observers import BatchEnded as BatchEnded
    from .observers import CallEnded as CallEnded
    from .observers import EngineClosed as EngineClosed
    from .observers import EngineStatistics as EngineStatistics
    from .observers import Event as Event
    from .observers import Observer as Observer
    from .observers import ReplicaChanged as ReplicaChanged
    from .observers import RequestBatchSent as RequestBatchSent
    from .observers import SampleDropped as SampleDropped
    from .observers import SampleEnded as SampleEnded
    from .observers import SampleSubmitted as SampleSubmitted
    from .observers import SourceStateChanged as SourceStateChanged
    from .observers import SourceStatistics as SourceStatistics
    from .observers.batch_report import BatchReport as BatchReport
    from .observers.batch_report import Part as Part
    from .samples import Cause as Cause
    from .samples import Failed as Failed
    from .samples import Message as Message
    from .samples import Outcome as Outcome
    from .samples import Sample as Sample
    from .samples import Scored as Scored
    from .samples import Split as Split
    from .samples import Verdict as Verdict
    from .samples.spent import Spent as Spent
    from .samples.spent import Usage as Usage
    from .scheduling.batches import Cutoff as Cutoff
    from .sources.replica_set import WeightTransfer as WeightTransfer

__version__ = "0.2.0"

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
    "TransientError",
    "observers": "AttemptEnded AttemptStarted BatchEnded CallEnded EngineClosed EngineStatistics Event "
    "Observer ReplicaChanged RequestBatchSent SampleDropped SampleEnded SampleSubmitted "
    "SourceStateChanged SourceStatistics",
    "observers.batch_report": "BatchReport Part",
    "samples": "Cause Failed Message Outcome Sample Scored Split Verdict",
    "samples.spent": "Spent Usage",
    "scheduling.batches": "Cutoff",
    "sources.replica_set": "WeightTransfer",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
