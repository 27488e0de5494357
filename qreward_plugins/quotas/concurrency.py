"""Learns the concurrency limit of a source that declares none: loss-based AIMD with slow start, as in TCP.

The window shrinks on 429s and timeouts. Latency is not used, because it depends on the length of the answer. The window
starts at `UNDECLARED_CONCURRENCY` and grows by one per answer until the first cut (slow start), later by one per window
of answers. It grows only while it is used: only answers to requests that were in flight when it was last full count.

In a 429 storm a server rejects every request, whatever the concurrency. Each cut then shrinks the window, which lowers
the load, but it says nothing about the limit unless a request sent after the previous cut was answered. Such cuts leave
the slow-start threshold unchanged, and below the threshold the window doubles with every round trip. Above the size of
the last cut, the step itself doubles, because the source now takes more than it did then.
"""

from __future__ import annotations

import math

UNDECLARED_CONCURRENCY = 32
"""Initial concurrency of a source that declares none."""

LARGEST = 1024
"""Largest learned concurrency."""
_CUT = 0.7
"""Factor of a cut."""


class ConcurrencyWindow:
    """A learned concurrency limit, at most `largest`. Times are seconds of one monotonic clock."""

    def __init__(self, largest: int = LARGEST) -> None:
        self._largest = largest
        self._workers = 1
        self.size = float(min(UNDECLARED_CONCURRENCY, largest))
        self._threshold = math.inf
        self._ceiling = math.inf
        self._cut_at = -math.inf
        self._evidence = True
        self._answers_that_count = 0
        self._gained = 0.0
        self._step = 1.0

    def divide(self, workers: int) -> None:
        """Divide the starting size among the workers, so that together they start with the size of one. A window that
        was cut keeps its size.
        """
        if workers > self._workers and not self.cut:
            self.size = max(1.0, self.size * self._workers / workers)
        self._workers = workers

    @property
    def cut(self) -> bool:
        """Whether the window was ever cut. Until then its size is a guess."""
        return self._cut_at > -math.inf

    def filled(self) -> None:
        """Record that the window is full."""
        self._answers_that_count = int(self.size)

    def answered(self, sent_at: float) -> None:
        """Record an answer to a request that was sent at `sent_at`."""
        if sent_at >= self._cut_at:
            self._evidence = True
        if self._answers_that_count <= 0 or self.size >= self._largest:
            return
        self._answers_that_count -= 1
        if self.size < self._threshold:
            self.size += 1.0
            return
        gain = self._step / self.size
        self.size = min(self.size + gain, float(self._largest))
        if self.size > self._ceiling:
            self._gained += gain
            if self._gained >= self._step:
                self._step *= 2.0
                self._gained = 0.0

    def throttled(self, now: float, sent_at: float, in_flight: int) -> bool:
        """Record a 429 or a timeout while `in_flight` other requests are in flight; return whether the window was cut.

        Requests that were sent before the last cut do not cut again. Nor does one with no other in flight: no
        concurrency explains that.
        """
        if sent_at < self._cut_at or not in_flight:
            return False
        used = min(self.size, in_flight + 1.0)
        if self._evidence:
            self._ceiling = used
            self._threshold = max(1.0, _CUT * used)
            self._evidence = False
        self.size = max(1.0, _CUT * used)
        self._step = 1.0
        self._gained = 0.0
        self._cut_at = now
        self._answers_that_count = 0
        return True
