"""Counters and snapshots of what the engine did, and what a batch waited for."""

from .blame import PART_KINDS, BatchReport, Part, PartKind
from .facts import Facts, summary
from .failures import FailureLog
from .statistics import EngineCounters, EngineStatistics, SourceCounters, SourceStatistics
from .waiting import WaitBySize, Waits, percentile

__all__ = [
    "PART_KINDS",
    "BatchReport",
    "EngineCounters",
    "EngineStatistics",
    "Facts",
    "FailureLog",
    "Part",
    "PartKind",
    "SourceCounters",
    "SourceStatistics",
    "percentile",
    "WaitBySize",
    "Waits",
    "summary",
]
