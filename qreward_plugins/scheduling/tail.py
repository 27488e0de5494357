"""Learns how much longer an attempt of a given age will take, from all attempts of an event loop.

Age is a multiple of the expected latency, so that sources and sizes can be pooled. An attempt that is a little late
will end soon; from some age on it is more likely a straggler, which takes many times longer. That age depends on the
judge and the sources, so it is learned: as a hazard per step of age (Kaplan and Meier, "Nonparametric Estimation from
Incomplete Observations", 1958). This method uses cancelled attempts, too. They are the slow ones, which were replaced
by a hedge; without them there would seem to be no stragglers.
"""

from __future__ import annotations

import bisect
import math

_EDGES = tuple(0.1 * 1.15**step for step in range(42))
"""Ages at which the steps end: 0.1, growing by 15 % to 31."""
_PRIOR_ATTEMPTS = 30.0
_PRIOR_SIGMA = 0.45
_PRIOR_STRAGGLERS = 0.02
_PRIOR_FACTOR = 10.0
"""The distribution before any attempt has ended, which weighs as much as 30 attempts: lognormal with this sigma; 2 %
are stragglers that take ten times as long."""
_MEMORY = 2000.0
"""Attempts after which all counts are halved, so that old ones fade."""
_REFRESH = 16
"""Attempts after which the figures are computed again."""
_MOST_NOTED = 512
"""Attempts that are kept until somebody reads the figures: a multiple of `_REFRESH`."""


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
            self._seen += 1.0
            if self._seen > _MEMORY:
                self._add_at_risk(reached)
                reached = [0.0] * len(_EDGES)
                self._seen /= 2
                self._at_risk = [risk / 2 for risk in self._at_risk]
                self._ended = [ended / 2 for ended in self._ended]
        self._add_at_risk(reached)

    def _add_at_risk(self, reached: list[float]) -> None:
        """Count attempts in all steps up to their last one."""
        beyond = 0.0
        for step in range(len(_EDGES) - 1, -1, -1):
            beyond += reached[step]
            self._at_risk[step] += beyond

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
        total = 0.0
        self._hazard = []
        for ended, risk in zip(self._ended, self._at_risk, strict=True):
            # The 1 keeps a step in which all attempts have ended so far from being certain.
            total += ended / (risk + 1.0)
            self._hazard.append(total)


def _prior_survival(age: float) -> float:
    if age <= 0:
        return 1.0

    def beyond(ratio: float) -> float:
        return 0.5 * math.erfc((math.log(ratio) / _PRIOR_SIGMA + _PRIOR_SIGMA / 2) / math.sqrt(2))

    return (1 - _PRIOR_STRAGGLERS) * beyond(age) + _PRIOR_STRAGGLERS * beyond(age / _PRIOR_FACTOR)
