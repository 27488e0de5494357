"""Defines `StreamProbe`: whether the servers of a source stream, which one request finds out (`stream: auto`)."""

from __future__ import annotations

from .replica import Replica

PENDING_S = 60.0
"""Longest time in seconds for which the answer of a replica that refused to stream is waited for."""


class StreamProbe:
    """Finds out whether the servers of a source stream. Times are seconds of the event loop's clock.

    A replica may refuse a request for a stream because it is broken, or because the request is at fault. So it refuses
    streams only if it answers the next request, which asks for none. If it refuses that one, too, another request for a
    stream finds out.
    """

    def __init__(self, streams: bool | None) -> None:
        self._streams = streams
        """Whether they stream; None if that is unknown."""
        self._asking = False
        self._refused: tuple[Replica, float] | None = None
        """The replica that refused to stream, and when."""

    def asks(self, now: float) -> bool:
        """Whether the next request is to ask for a stream."""
        if self._streams is None and not self._asking:
            if self._refused is not None:
                self._look(*self._refused, now)
            self._asking = self._streams is None and self._refused is None
            return self._asking
        return self._streams is True

    @property
    def asking(self) -> bool:
        """Whether a request is under way that finds out."""
        return self._asking

    def learned(self, streams: bool | None) -> None:
        """Record what the request has found out; None: nothing."""
        self._asking, self._streams = False, streams

    def refused(self, replica: Replica, now: float) -> None:
        """Record that `replica` refused the request, whatever the reason."""
        self._asking, self._refused = False, (replica, now)

    def _look(self, replica: Replica, at: float, now: float) -> None:
        """Find out why a replica refused: `at` is when."""
        if replica.answered_at > at:
            self._streams = False
        if self._streams is False or replica.erred_since(at) or not 0 <= now - at < PENDING_S:
            self._refused = None
