"""Counters and snapshots of what the engine did."""

from .statistics import EngineCounters, EngineStatistics, SourceCounters, SourceStatistics, percentile

__all__ = ["EngineCounters", "EngineStatistics", "SourceCounters", "SourceStatistics", "percentile"]
