"""Reads the rate limits and pauses that a server states in the headers of a reply.

Vendors use different formats (seconds, `6m0s`, milliseconds, HTTP dates, RFC 3339), and a wrong reading pauses a source
for hours or not at all. A value that cannot be parsed is therefore ignored, and every other value is clamped. Dates are
compared with the `Date` header of the same reply, because the server's clock may differ from ours.

Sources: RFC 9110 section 10.2.3 (Retry-After), draft-ietf-httpapi-ratelimit-headers, and the vendors' own descriptions
of `x-ratelimit-*` and `anthropic-ratelimit-*`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

LONGEST_PAUSE_S = 300.0
"""The longest pause that a server can ask for, in seconds. A longer one is cut to this."""

_LONGEST_WINDOW_S = 86_400.0
_LONGEST_VALUE_CHARS = 64
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[dhms]))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[dhms])")
_UNITS_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}

_FACTS = {"limit": "per_window", "remaining": "remaining", "reset": "reset_s"}
# The most specific spelling comes first; the last one counts requests, although its name does not say so.
_SPELLINGS = (
    ("requests", "x-ratelimit-{fact}-requests"),
    ("tokens", "x-ratelimit-{fact}-tokens"),
    ("requests", "anthropic-ratelimit-requests-{fact}"),
    ("tokens", "anthropic-ratelimit-tokens-{fact}"),
    ("requests", "ratelimit-{fact}"),
)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the pause that a reply asks for in seconds, from 0 to 300; None if it asks for none or is not readable.

    `retry-after-ms` wins over `Retry-After` (seconds or an HTTP date). Without either, the reset of a limit with
    nothing remaining is taken. `headers` must ignore case.
    """
    milliseconds = _number(_value(headers, "retry-after-ms"))
    if milliseconds is not None:
        return min(milliseconds / 1000, LONGEST_PAUSE_S)
    stated = _value(headers, "retry-after")
    pause_s = _number(stated)
    if pause_s is None and stated:
        pause_s = _until(_http_date(stated), headers)
    if pause_s is None:
        limits = announced_limits(headers)
        resets = [
            limits[f"{what}_reset_s"]
            for what in ("requests", "tokens")
            if limits.get(f"{what}_remaining") == 0 and f"{what}_reset_s" in limits
        ]
        pause_s = max(resets, default=None)
    return None if pause_s is None else min(pause_s, LONGEST_PAUSE_S)


def pause_of(stated: object) -> float | None:
    """Return a duration such as "34.07s", as Google states it in the body of an error (`RetryInfo.retryDelay`), in
    seconds from 0 to 300; None if it is not readable.
    """
    if not isinstance(stated, str) or len(stated) > _LONGEST_VALUE_CHARS or not stated.isascii():
        return None
    return min(_duration_s(stated), LONGEST_PAUSE_S) if _DURATION.fullmatch(stated) else None


def announced_limits(headers: Mapping[str, str]) -> dict[str, float]:
    """Return the limits that a reply states: `requests_per_window`, `requests_remaining`, `requests_reset_s`, and the
    same for `tokens`. Limits that are absent or unreadable are left out. `headers` must ignore case.
    """
    found: dict[str, float] = {}
    if "ratelimit" not in " ".join(headers).lower():
        return found
    for what, spelling in _SPELLINGS:
        for fact, suffix in _FACTS.items():
            key = f"{what}_{suffix}"
            stated = _value(headers, spelling.format(fact=fact))
            if not stated or key in found:
                continue
            number = _reset_s(stated, headers) if fact == "reset" else _number(stated)
            if number is not None and math.isfinite(number):
                found[key] = number
    return found


def _value(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name, "").strip()
    return value if len(value) <= _LONGEST_VALUE_CHARS else ""


def _number(text: str) -> float | None:
    # float() alone would take "inf", "nan", "1_0" and "-1".
    return float(text) if text.isascii() and _NUMBER.fullmatch(text) else None


def _reset_s(text: str, headers: Mapping[str, str]) -> float | None:
    seconds = _number(text)
    if seconds is None and _DURATION.fullmatch(text):
        seconds = _duration_s(text)
    if seconds is None:
        seconds = _until(_rfc3339(text), headers)
    # A larger number is a point in time, in an unknown unit.
    return seconds if seconds is not None and seconds <= _LONGEST_WINDOW_S else None


def _duration_s(text: str) -> float:
    return sum(float(number) * _UNITS_S[unit] for number, unit in _DURATION_PART.findall(text))


def _until(moment: datetime | None, headers: Mapping[str, str]) -> float | None:
    if moment is None:
        return None
    # The header is a wall-clock time, so it is compared with a wall clock and not with the event loop's time.
    now = _http_date(_value(headers, "date")) or datetime.now(timezone.utc)
    seconds = (moment - now).total_seconds()
    return seconds if seconds >= 0 else None


def _http_date(text: str) -> datetime | None:
    try:
        return _in_utc(parsedate_to_datetime(text))
    except (TypeError, ValueError, IndexError, OverflowError):
        return None


def _rfc3339(text: str) -> datetime | None:
    try:
        # Python 3.10 does not read the "Z".
        return _in_utc(datetime.fromisoformat(text[:-1] + "+00:00" if text[-1] in "Zz" else text))
    except (ValueError, OverflowError):
        return None


def _in_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
