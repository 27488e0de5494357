"""Learns how long a source takes for a request of a given size.

How much latency depends on the size of a request (its text, in bytes) differs from judge to judge: some write a
paragraph about each response, some one number. So latency is fitted as a straight line over size, with exponential
forgetting. While few answers are known, the line is drawn towards proportionality. An answer that took many times the
expected latency is a straggler and says little about the next one, so it counts with three times the latency that was
possible.

A few answers, or answers of one size only, say little about others. So there are two figures: the expected latency, for
planning, and the longest that the answers leave possible, for the decision to give an attempt up.
"""

from __future__ import annotations

import math

_MEMORY = 100
"""Approximate number of answers that are remembered; older ones fade."""
_CLIP = 3.0
"""Most that an answer counts, as a multiple of the longest latency that was possible."""
_PRIOR_ANSWERS = 8
_PRIOR_SPREAD = 0.3
"""Proportionality weighs as much as `_PRIOR_ANSWERS` answers whose sizes vary by this share. A line through a few
answers of about the same size says nothing about other sizes."""
_POSSIBLE_AFTER_ONE_S = 30.0
"""Latency, in seconds, that stays possible after one answer, however quick: it may have come from a filter in front of
the judge. It falls with the square of the number of answers."""
SETTLED_AFTER = 20
"""Answers after which the expected latency is reliable."""
SHORTEST_S = 1e-3
"""Shortest latency to expect, in seconds."""
SAFETY = 1.3
"""Factor on the expected latency of what must end in time: before a deadline, or before other jobs."""


class Speed:
    """A source's latency as a line over the size of a request. Sizes are bytes, times seconds."""

    __slots__ = ("_answers", "_base", "_cross", "_least_slope", "_mean_s", "_mean_size", "_slope", "_spread")

    def __init__(self) -> None:
        self._answers = 0.0
        self._mean_size = 0.0
        self._mean_s = 0.0
        self._spread = 0.0
        self._cross = 0.0
        self._base = 0.0
        self._slope = 0.0
        self._least_slope = 0.0

    @property
    def known(self) -> bool:
        """Whether the source has answered at all."""
        return self._answers > 0

    @property
    def settled(self) -> bool:
        """Whether it has answered often enough to be relied upon."""
        return self._answers >= SETTLED_AFTER

    @property
    def mean_s(self) -> float:
        """Latency of the average request so far; 0 before the first answer."""
        return self._mean_s

    @property
    def typical(self) -> tuple[float, float] | None:
        """Size and latency of the average request, once there were enough to rely upon."""
        return (self._mean_size, self._mean_s) if self.settled else None

    def expected_s(self, size: float) -> float:
        """Latency to expect of a request of `size` bytes; 0 before the first answer."""
        return max(self._base + self._slope * size, SHORTEST_S) if self._answers else 0.0

    def longest_s(self, size: float) -> float:
        """Longest latency of a request of `size` bytes that the answers so far leave possible; infinity before the
        first one. The more answers, and the more their sizes differ, the closer it is to `expected_s`.
        """
        if not self._answers:
            return math.inf
        flattest_s = self._mean_s + self._least_slope * (size - self._mean_size)
        return max(self.expected_s(size), flattest_s, _POSSIBLE_AFTER_ONE_S / self._answers**2)

    def size_within(self, seconds: float) -> float:
        """The largest size, in bytes, that is expected to take at most `seconds`: infinity for any, minus infinity for
        none.
        """
        if not self._answers or (self._slope <= 0 and self._base <= seconds):
            return math.inf
        if self._slope <= 0:
            return -math.inf
        return (seconds - self._base) / self._slope

    def learn(self, size: float, seconds: float) -> None:
        """Learn from an answer to a request of `size` bytes that took `seconds`."""
        answers, mean_size, mean_s = self._answers, self._mean_size, self._mean_s
        # `longest_s` is at least the line, so it matters only above that.
        if answers and seconds > _CLIP * (self._base + self._slope * size):
            seconds = min(seconds, _CLIP * self.longest_s(size))
        self._answers = answers = min(answers + 1, _MEMORY)
        weight = 1.0 / answers
        off_size, off_s = size - mean_size, seconds - mean_s
        self._mean_size = mean_size = mean_size + weight * off_size
        self._mean_s = mean_s = mean_s + weight * off_s
        self._spread += weight * ((1 - weight) * off_size * off_size - self._spread)
        self._cross = cross = self._cross + weight * ((1 - weight) * off_size * off_s - self._cross)
        proportional = mean_s / mean_size if mean_size > 0 else 0.0
        prior = _PRIOR_ANSWERS * (_PRIOR_SPREAD * mean_size) ** 2
        known = answers * self._spread + prior
        slope = (answers * cross + prior * proportional) / known if known > 0 else proportional
        self._slope = slope = min(max(slope, 0.0), proportional)
        # The same answers, drawn towards a latency that does not depend on the size.
        flattest = answers * cross / known if known > 0 else 0.0
        self._least_slope = min(max(flattest, 0.0), proportional)
        self._base = mean_s - slope * mean_size
