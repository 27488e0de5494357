"""The circuit breaker of a source: after failures in a row it keeps samples away, and lets single probes pass.

Without it a source that refuses at once would look like the fastest of all, and every waiting sample would use up its
attempts there instead of waiting a little for a healthy source. A source that accepts requests and never answers is
worse: nothing fails until a time limit of minutes has passed. So silence (`health.py`) opens it, too.

While samples wait for an open source, probes follow each other at the pace that `Health.pace_s` says. While none waits,
or other sources are better than one that answers mostly nonsense, the cooldown before each probe doubles, up to a
minute. Other processes are told the cooldown. In all cases one answer closes the breaker.
"""

from __future__ import annotations

import math
from collections.abc import Set

FAILURES_TO_OPEN = 5
"""Fewest failures in a row that open it."""
SHARE_TO_OPEN = 0.25
"""Failures in a row that open it, as a share of the attempts in flight. Errors come quicker than answers, so the first
ends of a burst are failures even if only one request in ten fails."""
SAMPLES_TO_OPEN = 3
"""Different samples among those failures, as long as others are in flight: a single sample may be to blame itself."""
FIRST_COOLDOWN_S = 5.0
LONGEST_COOLDOWN_S = 60.0
"""Cooldown: seconds for which it stays open. It doubles with each failed probe, from the first to the longest."""
PROBE_GAP_S = 3.0
"""Seconds after which another probe starts beside an overdue one."""
_MOST_CULPRITS = 64


class Culprits:
    """Counts how many different samples must be to blame for the failures of a source since it last answered.

    A request of several calls fails because of any of them. So the count is that of failed requests of which no two
    have a sample in common. It is never too high.
    """

    def __init__(self) -> None:
        self._apart: list[Set[int]] = []

    def __len__(self) -> int:
        return len(self._apart)

    def __contains__(self, sample: int) -> bool:
        return any(sample in request for request in self._apart)

    def add(self, samples: Set[int]) -> None:
        """Note a failed request, which carried these samples."""
        common = [request for request in self._apart if not request.isdisjoint(samples)]
        if len(common) == 1 and samples < common[0]:
            self._apart.remove(common[0])  # fewer samples can have caused it
        if (not common or samples < common[0]) and len(self._apart) < _MOST_CULPRITS:
            self._apart.append(samples)

    def clear(self) -> None:
        """Forget them, because the source has answered."""
        self._apart.clear()


class Breaker:
    """Closed: every attempt may pass. Open until a time. Half-open: one probe may pass, and its end decides.

    With `recovery_s`, it opens after `failures_to_open` failures in a row, whoever is in flight, and for that many
    seconds each time, whoever needs it.
    """

    def __init__(self, *, failures_to_open: float = FAILURES_TO_OPEN, recovery_s: float | None = None) -> None:
        self._failures_to_open = failures_to_open
        self._recovery_s = recovery_s
        self.failures_in_row = 0
        self.failing = Culprits()
        """The samples that failed since the last answer."""
        self.pace_s: float | None = None
        """The least time between two probes, in seconds; None: the cooldown."""
        self.probes = 0
        """Probes that failed since it opened."""
        self.given_up = 0
        """Overdue probes that were given up since it opened, because they took the place of the next one."""
        self.closed = True
        """Whether every attempt may pass. An attribute and not a property, because each attempt asks seven times."""
        self._failed_at = -math.inf
        self._overdue = False
        """Whether a probe has become overdue since it opened."""
        self._probing = False

    def wait_s(self, now: float) -> float:
        """Seconds until an attempt may pass; infinity while a probe is under way."""
        if self.closed:
            return 0.0
        if self._probing:
            return math.inf
        gap_s = PROBE_GAP_S if self._overdue else 0.0
        wait_s = self._cooldown_s if self.pace_s is None else max(self.pace_s, gap_s)
        return max(0.0, self._failed_at + wait_s - now)

    @property
    def _cooldown_s(self) -> float:
        if self._recovery_s is not None:
            return self._recovery_s
        return min(FIRST_COOLDOWN_S * 2.0 ** min(self.probes, 10), LONGEST_COOLDOWN_S)

    def open_s(self, now: float) -> float:
        """Seconds until its cooldown is over; 0 if it is closed, or a probe is under way."""
        return 0.0 if self.closed or self._probing else max(0.0, self._failed_at + self._cooldown_s - now)

    def started(self) -> None:
        """Note that an attempt passed."""
        if not self.closed:
            self._probing = True

    def succeeded(self) -> None:
        """Note that the source answered."""
        if self.closed and not self.failures_in_row:
            return
        self.closed = True
        self.failures_in_row = 0
        self.failing.clear()
        self._failed_at = -math.inf
        self._overdue = False
        self.probes = 0
        self.given_up = 0
        self._probing = False

    def failed(self, now: float, *, probe: bool, in_flight: int, samples: Set[int] | None = None) -> bool:
        """Note a failure while `in_flight` other attempts are under way; return whether it opened just now.

        `probe`: the attempt started while the breaker was open. `samples`: the numbers of the samples that its request
        carried; None if each failure is that of another sample.
        """
        self.failures_in_row += 1
        if samples is not None:
            self.failing.add(samples)
        if probe and not self.closed:
            self.probes += 1
            self._open(now)
            return True
        several = samples is None or not in_flight or len(self.failing) >= SAMPLES_TO_OPEN
        enough = self._failures_to_open
        if self._recovery_s is None:
            enough = max(enough, SHARE_TO_OPEN * in_flight)
        if self.closed and several and self.failures_in_row >= enough:
            self._open(now)
            return True
        return False

    def overdue(self, now: float) -> None:
        """Note that a probe takes far too long. It may still answer; another one may join it after a pause."""
        if not self.closed:
            self._overdue = True
            self._open(now)

    def trip(self, now: float) -> bool:
        """Open it for silence, refusals or invalid replies; return whether it was closed."""
        if not self.closed:
            return False
        self._open(now)
        return True

    def opened_elsewhere(self) -> None:
        """Note that the circuit of another process is open. A probe may go here at once."""
        self.closed = False

    def answered_elsewhere(self) -> None:
        """Note that another process had an answer: a probe may go at once."""
        self._failed_at = -math.inf

    def abandoned(self, *, probe: bool) -> None:
        """Note that an attempt ended without evidence about the source (cancelled, throttled)."""
        if probe:
            self._probing = False

    def _open(self, now: float) -> None:
        self.closed = False
        self._failed_at = now
        self._probing = False
