"""Logs every attempt and every call of a function (`debug=True`)."""

from __future__ import annotations

import logging

from ..observers import AttemptEnded, AttemptStarted, CallEnded, Event, SourceStateChanged
from ..secrets import one_line

_log = logging.getLogger("qreward_plugins.accelerate")
_CHARS = 300


class DebugLog:
    """An observer that writes one line for each event of an attempt or a call, at level DEBUG."""

    def __call__(self, event: Event, /) -> None:
        if not _log.isEnabledFor(logging.DEBUG):
            return
        if isinstance(event, AttemptStarted):
            kind = "hedge" if event.hedge else "retry" if event.attempt else "attempt"
            _log.debug("%s, call %d: %s %d starts, %d in flight", *_where(event), kind, event.attempt, event.in_flight)
        elif isinstance(event, AttemptEnded):
            detail = f": {one_line(event.detail, _CHARS)}" if event.detail else ""
            _log.debug(
                "%s, call %d: attempt %d %s after %.3f s%s",
                *_where(event),
                event.attempt,
                "timed out" if event.timed_out else event.result,
                event.seconds,
                detail,
            )
        elif isinstance(event, CallEnded):
            end = event.reason or "answered"
            _log.debug("%s, call %d: %s, attempts: %d", event.judge, event.call, end, event.attempts)
        elif isinstance(event, SourceStateChanged):
            _log.debug("%s is %s: %s", event.source, event.state, one_line(event.problem, _CHARS))


def _where(event: AttemptStarted | AttemptEnded) -> tuple[str, int]:
    return event.judge, event.call
