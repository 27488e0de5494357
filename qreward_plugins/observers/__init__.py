"""Events of an engine, and their observers: statistics, logs, and those of the user.

`events.py` defines all events. `statistics.py` counts them: a new metric is a field and a line there.
"""

from .base import Observer, Observers, load_observers, with_names
from .events import (
    AttemptEnded,
    AttemptStarted,
    BatchEnded,
    CallEnded,
    EngineClosed,
    Event,
    LateVerdict,
    ReplicaChanged,
    RequestBatchSent,
    SampleDropped,
    SampleEnded,
    SampleSubmitted,
    SourceStateChanged,
)
from .logs import BatchLog, FailureLog
from .statistics import EngineStatistics, SourceGauges, SourceStatistics, Statistics

__all__ = [
    "AttemptEnded",
    "AttemptStarted",
    "BatchEnded",
    "BatchLog",
    "CallEnded",
    "EngineClosed",
    "EngineStatistics",
    "Event",
    "FailureLog",
    "LateVerdict",
    "Observer",
    "Observers",
    "ReplicaChanged",
    "RequestBatchSent",
    "SampleDropped",
    "SampleEnded",
    "SampleSubmitted",
    "SourceGauges",
    "SourceStateChanged",
    "SourceStatistics",
    "Statistics",
    "load_observers",
    "with_names",
]
