"""Observers that log failed samples, and what a batch waited for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from ..samples import Failed
from ..secrets import one_line
from .events import DETAIL_CHARS, NAME_CHARS, BatchEnded, SampleEnded

_log = logging.getLogger("qreward_plugins.engine")
_batch_log = logging.getLogger("qreward_plugins.scheduling")

COUNT_S = 60.0
"""Seconds after a line in which its cause is only counted."""


class FailureLog:
    """Warns of failed samples.

    The first failure of each kind (cause, reason, judge and source) is logged at once. Further ones are counted, and
    logged in one line at most every `COUNT_S` seconds.
    """

    def __init__(self) -> None:
        self._causes: dict[tuple[str, str, str], tuple[float, int]] = {}
        """When each was logged last, and how many more there were since then."""

    def reads(self) -> Mapping[type, Callable[[Any], None]]:
        """The handler of each type of event."""
        return {SampleEnded: self.ended}

    def ended(self, event: SampleEnded) -> None:
        """Warn of a failure, or of a floor in its place."""
        failed = event.outcome.failure
        if failed is None:
            return
        key = (failed.label, failed.judge, failed.source)
        logged_at, more = self._causes.get(key, (-math.inf, -1))
        waited_s, more = event.at - logged_at, more + 1
        if waited_s < COUNT_S:
            self._causes[key] = logged_at, more
            return
        self._causes[key] = event.at, 0
        before = f"{more} more samples ended in this way in the last {waited_s:.0f} s; the last was " if more else ""
        _log.warning("%s%s", before, _described(event, failed))


class BatchLog:
    """Logs in one line what a batch of several samples waited for."""

    def reads(self) -> Mapping[type, Callable[[Any], None]]:
        """The handler of each type of event."""
        return {BatchEnded: self.ended}

    def ended(self, event: BatchEnded) -> None:
        """Log the report of a batch that has ended."""
        if event.report.samples > 1:
            _batch_log.info("%s", event.report.describe())


def _described(event: SampleEnded, failed: Failed) -> str:
    # Names come from data sets and details from servers, so both may contain line breaks and control characters.
    name = one_line(event.sample_id, NAME_CHARS) if event.sample_id else "sample"
    where = f" ({one_line(event.data_source, NAME_CHARS)})" if event.data_source else ""
    return f"{name}{where}: {one_line(failed.describe(), DETAIL_CHARS)}"
