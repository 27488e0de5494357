"""Observers that log failed samples, and what a batch waited for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..samples import Failed
from ..secrets import one_line
from .events import DETAIL_CHARS, NAME_CHARS, BatchEnded, SampleEnded

_log = logging.getLogger("qreward_plugins.engine")
_batch_log = logging.getLogger("qreward_plugins.scheduling")

FIRST_COUNT_S = 60.0
"""Seconds after a line in which its cause is only counted. It doubles with every further line."""
LONGEST_COUNT_S = 3600.0
"""Most seconds in which a cause is only counted."""


@dataclass(slots=True)
class _Cause:
    logged_at: float
    count_s: float = FIRST_COUNT_S
    more: int = 0


class FailureLog:
    """Warns of failed samples.

    The first failure of each kind (cause, reason, judge and source) is logged at once. Further ones are counted, and
    logged in one line after at least `FIRST_COUNT_S` seconds, then after twice that, and so on.
    """

    def __init__(self) -> None:
        self._causes: dict[tuple[str, str, str, str], _Cause] = {}

    def reads(self) -> Mapping[type, Callable[[Any], None]]:
        """The handler of each type of event."""
        return {SampleEnded: self.ended}

    def ended(self, event: SampleEnded) -> None:
        """Warn of a failure, or of a floor in its place."""
        failed = event.outcome.failure
        if failed is not None:
            self._note(event, failed)

    def _note(self, event: SampleEnded, failed: Failed) -> None:
        now = event.at
        key = (failed.cause.value, failed.reason, failed.judge, failed.source)
        known = self._causes.get(key)
        if known is None:
            self._causes[key] = _Cause(now)
            _log.warning("%s", _described(event, failed))
            return
        known.more += 1
        if now - known.logged_at < known.count_s:
            return
        waited_s, more = now - known.logged_at, known.more
        known.logged_at, known.more = now, 0
        known.count_s = min(2 * known.count_s, LONGEST_COUNT_S)
        _log.warning(
            "%d more samples ended in this way in the last %.0f s; the last was %s",
            more,
            waited_s,
            _described(event, failed),
        )


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
