"""Logs failed samples: one line for each cause, then counts, so that many failures do not flood the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..redaction import one_line
from ..samples import Failed, Sample

_log = logging.getLogger("qreward_plugins.engine")

FIRST_REST_S = 60.0
"""Seconds after a line for which its cause is only counted; doubled after every further line."""
LONGEST_REST_S = 3600.0
"""Longest such time, in seconds."""

_NAME_CHARS = 80
_DETAIL_CHARS = 1000


@dataclass(slots=True)
class _Cause:
    told_at: float
    rest_s: float = FIRST_REST_S
    more: int = 0


class FailureLog:
    """Warns of failed samples.

    The first failure of each kind (cause, reason, judge and source) is logged at once. Further ones are counted and
    logged together, the next line after `FIRST_REST_S` seconds at the earliest, then after twice that, and so on.
    """

    def __init__(self) -> None:
        self._causes: dict[tuple[str, str, str, str], _Cause] = {}

    def note(self, sample: Sample, failed: Failed, now: float) -> None:
        """Note a failure at `now`, on the event loop's clock in seconds."""
        key = (failed.cause.value, failed.reason, failed.judge, failed.source)
        known = self._causes.get(key)
        if known is None:
            self._causes[key] = _Cause(now)
            _log.warning("%s", _told(sample, failed))
            return
        known.more += 1
        if now - known.told_at < known.rest_s:
            return
        waited_s, more = now - known.told_at, known.more
        known.told_at, known.more = now, 0
        known.rest_s = min(2 * known.rest_s, LONGEST_REST_S)
        _log.warning(
            "%d more samples failed so in the last %.0f s; the last was %s", more, waited_s, _told(sample, failed)
        )


def _told(sample: Sample, failed: Failed) -> str:
    # Names come from data sets and details from servers, so both may hold line breaks and control characters.
    name = one_line(str(sample.id), _NAME_CHARS) if sample.id is not None else "sample"
    where = f" ({one_line(sample.data_source, _NAME_CHARS)})" if sample.data_source else ""
    return f"{name}{where}: {one_line(failed.describe(), _DETAIL_CHARS)}"
