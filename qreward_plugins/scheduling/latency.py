"""The latency model: how long a source takes for a request of a given size, and how much longer an attempt will take.

How much latency depends on the size of a request (its text, in bytes) differs from judge to judge: some write a
paragraph about each response, some one number. So latency is fitted as a straight line over size (`Speed`), with
exponential forgetting. While few answers are known, the line is drawn towards proportionality. An answer that took many
times the expected latency is a straggler and says little about the next one, so it counts with three times the latency
that was possible.

A few answers, or answers of one size only, say little about others. So there are two figures: the expected latency, for
planning, and the longest that the answers leave possible, for the decision to give an attempt up.

`Tail` counts the age of attempts as a multiple of the expected latency, so that sources and sizes can be pooled. An
attempt that is a little late will end soon; from some age on it is more likely a straggler. That age depends on the
judge and the sources, so it is learned: as a hazard per step of age (Kaplan and Meier, "Nonparametric Estimation from
Incomplete Observations", 1958). This method uses cancelled attempts, too. They are the slow ones, which were replaced
by a hedge; without them there would seem to be no stragglers.
"""

from __future__ import annotations

import bisect
import itertools
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
_EDGES = tuple(0.1 * 1.15**step for step in range(42))
"""Ages at which the steps end: 0.1, growing by 15 % to 31."""
_PRIOR_ATTEMPTS = 30.0
_PRIOR_SIGMA = 0.45
_PRIOR_STRAGGLERS = 0.02
_PRIOR_FACTOR = 10.0
"""The distribution before any attempt has ended, which weighs as much as 30 attempts: lognormal with this sigma; 2 %
are stragglers that take ten times as long."""
_TAIL_MEMORY = 2000.0
"""Attempts after which all counts are halved, so that old ones fade."""
_REFRESH = 16
"""Attempts after which the figures are computed again."""
_MOST_NOTED = 512
"""Attempts that are kept until somebody reads the figures: a multiple of `_REFRESH`."""


class Speed:
    """A source's latency as a line over the size of a request. Sizes are bytes, times seconds."""

    def __init__(self) -> None:
        self._answers = 0.0
        self._mean_size = 0.0
        self._mean_s = 0.0
        self._spread = 0.0
        self._cross = 0.0
        self._base = 0.0
        self._slope = 0.0
        self._known = 0.0

    @property
    def known(self) -> bool:
        """Whether the source has answered at all."""
        return self._answers > 0

    @property
    def settled(self) -> bool:
        """Whether it has answered often enough to be relied upon."""
        return self._answers >= SETTLED_AFTER

    def expected_s(self, size: float) -> float:
        """Latency to expect of a request of `size` bytes; 0 before the first answer."""
        return max(self._base + self._slope * size, SHORTEST_S) if self._answers else 0.0

    def longest_s(self, size: float) -> float:
        """Longest latency of a request of `size` bytes that the answers so far leave possible; infinity before the
        first one. The more answers, and the more their sizes differ, the closer it is to `expected_s`.
        """
        if not self._answers:
            return math.inf
        # The same answers as in `learn`, drawn towards a latency that does not depend on the size.
        flattest = self._answers * self._cross / self._known if self._known > 0 else 0.0
        proportional = self._mean_s / self._mean_size if self._mean_size > 0 else 0.0
        flattest_s = self._mean_s + min(max(flattest, 0.0), proportional) * (size - self._mean_size)
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

    def doubt(self) -> None:
        """Trust the next answers more than those so far, because the source was down: it may be slower now. Otherwise a
        source that has become ten times slower is taken for silent again and again, until its samples are lost.
        """
        self._answers = min(self._answers, 1.0)

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
        self._known = known
        self._base = mean_s - slope * mean_size


class Tail:
    """The distribution of ages at which attempts end."""

    def __init__(self) -> None:
        self._at_risk = [_PRIOR_ATTEMPTS * _prior_survival(age) for age in (0.0, *_EDGES[:-1])]
        self._ended = [
            risk - _PRIOR_ATTEMPTS * _prior_survival(age) for risk, age in zip(self._at_risk, _EDGES, strict=True)
        ]
        self._seen = 0.0
        self._noted: list[tuple[float, float]] = []
        """The ages of attempts that the counts lack, each with 1 if it ended then, else 0. Mostly nobody reads the
        figures between two attempts, and counting each by itself took 7 % of the time of a call."""
        self._residual: list[float] = []
        self._hazard: list[float] = []
        self._update()

    def ended(self, age: float) -> None:
        """Learn from an attempt that was answered at `age`."""
        self._note(age, 1.0)

    def given_up(self, age: float) -> None:
        """Learn from an attempt that was cancelled at `age`: it would have ended later."""
        self._note(age, 0.0)

    def residual(self, age: float) -> float:
        """How much longer an attempt of `age` will take on average, in the same unit."""
        self._refresh()
        step = bisect.bisect_left(_EDGES, age)
        return self._residual[step] if step < len(_EDGES) else age / 2

    def hazard(self, age: float) -> float:
        """The cumulative hazard up to `age`: the expected number of ends, if an attempt started again whenever it
        ended.
        """
        if age <= 0:
            return 0.0
        self._refresh()
        step = bisect.bisect_left(_EDGES, age)
        if step >= len(_EDGES):
            return self._hazard[-1]
        start = _EDGES[step - 1] if step else 0.0
        before = self._hazard[step - 1] if step else 0.0
        return before + (self._hazard[step] - before) * (age - start) / (_EDGES[step] - start)

    def _note(self, age: float, event: float) -> None:
        self._noted.append((age, event))
        if len(self._noted) >= _MOST_NOTED:
            self._refresh()

    def _refresh(self) -> None:
        """Count the attempts that were noted, and compute the figures, for every full `_REFRESH` attempts."""
        full = len(self._noted) // _REFRESH * _REFRESH
        if full:
            noted, self._noted = self._noted[:full], self._noted[full:]
            self._count(noted)
            self._update()

    def _count(self, noted: list[tuple[float, float]]) -> None:
        last = len(_EDGES) - 1
        reached = [0.0] * len(_EDGES)  # by their last step
        for age, event in noted:
            step = min(bisect.bisect_left(_EDGES, age), last)
            reached[step] += 1.0
            self._ended[step] += event
        beyond = 0.0
        for step in range(last, -1, -1):
            beyond += reached[step]
            self._at_risk[step] += beyond
        self._seen += len(noted)
        if self._seen > _TAIL_MEMORY:
            self._seen /= 2
            self._at_risk = [risk / 2 for risk in self._at_risk]
            self._ended = [ended / 2 for ended in self._ended]

    def _update(self) -> None:
        residual = [0.0] * len(_EDGES)
        after = 0.5 * _EDGES[-1]
        for index in range(len(_EDGES) - 1, -1, -1):
            start = _EDGES[index - 1] if index else 0.0
            width = _EDGES[index] - start
            hazard = min(1.0, self._ended[index] / self._at_risk[index]) if self._at_risk[index] > 0 else 0.0
            after = (1 - hazard) * (width + after) + hazard * width / 2
            residual[index] = after
        self._residual = residual
        # The 1 keeps a step in which all attempts have ended so far from being certain.
        each = (ended / (risk + 1.0) for ended, risk in zip(self._ended, self._at_risk, strict=True))
        self._hazard = list(itertools.accumulate(each))


def _prior_survival(age: float) -> float:
    if age <= 0:
        return 1.0

    def beyond(ratio: float) -> float:
        return 0.5 * math.erfc((math.log(ratio) / _PRIOR_SIGMA + _PRIOR_SIGMA / 2) / math.sqrt(2))

    return (1 - _PRIOR_STRAGGLERS) * beyond(age) + _PRIOR_STRAGGLERS * beyond(age / _PRIOR_FACTOR)
