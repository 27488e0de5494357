"""Plain data about what happened: the facts of an outcome, and what a batch waited for."""

from .batch_report import PART_KINDS, BatchReport, Part, PartKind
from .facts import METRICS, Facts, Metric, summary
from .waiting import WaitBySize, Waits, percentile

__all__ = [
    "PART_KINDS",
    "BatchReport",
    "Facts",
    "METRICS",
    "Metric",
    "Part",
    "PartKind",
    "percentile",
    "WaitBySize",
    "Waits",
    "summary",
]
