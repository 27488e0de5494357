"""How many requests an undeclared source takes at once, learned from what it loses: grown by steps, cut by a factor.

Latency says nothing here, because it follows the length of the answer; what counts are 429s, and requests that were not
answered in their time. The window starts wide and grows by one with every answer until it is cut for the first time,
later by one for a whole window of answers, and only while it is really used: the answers to what was in flight when the
window was last full count, no others.

A server may throttle everything for a while, whatever is in flight (a 429 storm). Each cut then makes the window
smaller, which is kind to the server, but teaches nothing unless a request that was sent after the last cut was
answered. Such cuts therefore leave the threshold alone, and up to the threshold the window doubles with every round
trip. Beyond the size at which it was last throttled, the step itself doubles: what was learned no longer holds.
"""

from __future__ import annotations

import math

UNDECLARED_CONCURRENCY = 32
"""Requests in flight at first at a source that declares no limit of them."""

_LARGEST = 1024
_CUT = 0.7
_COOLDOWN_S = 1.0


class ConcurrencyWindow:
    """A learned limit of requests in flight. Times are seconds of one monotonic clock."""

    __slots__ = ("_answers_that_count", "_ceiling", "_cut_at", "_evidence", "_gained", "_step", "_threshold", "size")

    def __init__(self) -> None:
        self.size = float(UNDECLARED_CONCURRENCY)
        self._threshold = math.inf
        self._ceiling = math.inf
        self._cut_at = -math.inf
        self._evidence = True
        self._answers_that_count = 0
        self._gained = 0.0
        self._step = 1.0

    @property
    def cut(self) -> bool:
        """Whether it was ever cut: until then it is a guess."""
        return self._cut_at > -math.inf

    def filled(self) -> None:
        """Note that as many requests are in flight as the window allows."""
        self._answers_that_count = int(self.size)

    def answered(self, sent_at: float) -> None:
        """Note an answer to a request sent at `sent_at`."""
        if sent_at >= self._cut_at:
            self._evidence = True
        if self._answers_that_count <= 0 or self.size >= _LARGEST:
            return
        self._answers_that_count -= 1
        if self.size < self._threshold:
            self.size += 1.0
            return
        gain = self._step / self.size
        self.size += gain
        if self.size > self._ceiling:
            self._gained += gain
            if self._gained >= self._step:
                self._step *= 2.0
                self._gained = 0.0

    def throttled(self, now: float, sent_at: float, in_flight: int) -> bool:
        """Note a 429 while `in_flight` other requests are in flight; return whether the window was cut.

        A request sent before the last cut teaches nothing, nor does any within the cooldown.
        """
        if sent_at < self._cut_at or now - self._cut_at < _COOLDOWN_S:
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
