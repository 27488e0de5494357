"""When a source may be asked again: after a 429 (`Pauses`), and after failures (`Breaker`).

A source pauses as long as it asks for, or growing from 429 to 429 if it states no time. A 429 that arrives during a
pause, or to a request that was sent before it began, neither starts a new pause nor adds growth. It prolongs the pause
only if it states a `Retry-After` that ends later.

One request probes the source every minute of a pause, or every second if the source states no time, and an answer ends
the pause. So an absurd `Retry-After` of one reply cannot keep all samples from the source.

The circuit breaker keeps requests from a source that does not answer, and lets single probes pass. What opens it, and
how fast probes follow each other, its user decides.

The scheduler and accelerated functions use both, and processes tell each other of them. So they know neither attempts
nor samples, but times and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Set

FIRST_S = 1.0
LONGEST_S = 60.0
"""Pause in seconds if the source states none: it doubles from 429 to 429, from the first to the longest."""
PROBE_AFTER_S = 60.0
"""Seconds of a pause after which one request probes the source."""
TESTED_FIRST_S, TESTED_S = 0.5, 10.0
"""Seconds for which other processes wait for this one's first request after a first pause, and after later ones."""
_SHORTEST_S = 0.1
"""Shortest first pause, in seconds, even if the source asks for less."""
_MOST_BURSTS = 4
"""Stated pauses in a row, with nothing accepted in between, after which all requests may go at once. Later pauses grow,
and single requests probe the source meanwhile."""
_LATER_S = 0.05
"""A pause is prolonged only by more than this: smaller differences come from the network."""

FAILURES_TO_OPEN = 5
"""Fewest failures in a row that open a circuit."""
SHARE_TO_OPEN = 0.25
"""Failures in a row that open it, as a share of the attempts in flight. Errors come quicker than answers, so the first
ends of a burst are failures even if only one request in ten fails."""
SAMPLES_TO_OPEN = 3
"""Different samples among those failures, as long as others are in flight: a single sample may be to blame itself."""
SHORTEST_PACE_S = 0.5
"""Pace of the first probes: seconds from one to the next."""
_MOST_CULPRITS = 64


class Pauses:
    """When a source may be asked again. Times are seconds of the event loop's clock."""

    def __init__(self) -> None:
        self.until = -math.inf
        """When the pause ends, probes or not."""
        self._at = self._since = -math.inf
        self._probe_at = math.inf
        self._probe_after_s = PROBE_AFTER_S
        self.in_row = 0
        """429s in a row that began a pause, with nothing accepted in between."""
        self._stated_until = -math.inf
        """Until when a pause lasts that the source stated to this process; minus infinity if the last 429 stated none.
        """
        self._tested_elsewhere = False

    def tested_s(self, now: float) -> float:
        """Seconds for which other processes should wait while this one tests the source; 0: they need not wait. It
        tests after a 429 without a stated time, and goes on until a request is accepted.
        """
        if not self.in_row or self._stated_until > -math.inf:
            return 0.0
        return TESTED_S if self.in_row > 1 else max(0.0, self.until + TESTED_FIRST_S - now)

    def left_s(self, now: float) -> float:
        """Seconds until the next request may go, which is a probe if the pause lasts longer; 0: now."""
        return 0.0 if self.until <= now else max(0.0, min(self.until, self._probe_at) - now)

    def covers(self, at: float) -> bool:
        """Whether a request that was sent at `at` probed the last pause."""
        return self._at < at < self.until

    def started(self, now: float) -> None:
        """Note that a request is sent. During a pause it is the probe, and the next one has to wait."""
        if now < self.until:
            self._probe_at = now + self._probe_after_s

    def throttled(self, retry_after_s: float | None, sent_at: float, now: float) -> float | None:
        """Note a 429 to a request sent at `sent_at`; return the seconds of the pause from now, or None if it neither
        begins nor becomes longer.
        """
        if retry_after_s is not None and math.isnan(retry_after_s):
            retry_after_s = None
        if sent_at <= self._at or now < self.until:
            if retry_after_s is None or now + retry_after_s <= max(self.until, now) + _LATER_S:
                return None
            if now >= self.until or self._probe_after_s < PROBE_AFTER_S:
                self._probe_after_s, self._probe_at = PROBE_AFTER_S, math.inf
            return self._pause(now + retry_after_s, now)
        self.in_row += 1
        growth = 2.0 ** min(self.in_row - 1, 10)
        if retry_after_s is None:
            pause_s = min(FIRST_S * growth, LONGEST_S)
        else:
            # A server that keeps throttling and says "retry at once" must not get a storm of requests.
            pause_s = max(retry_after_s, min(_SHORTEST_S * growth, FIRST_S))
        self._stated_until = -math.inf if retry_after_s is None else now + retry_after_s
        self._probe_after_s = PROBE_AFTER_S if retry_after_s is not None else FIRST_S
        if retry_after_s is not None and self.in_row > _MOST_BURSTS:
            self._probe_after_s = max(retry_after_s, FIRST_S)
            pause_s = min(self._probe_after_s * growth / 2**_MOST_BURSTS, max(self._probe_after_s, LONGEST_S))
        self._since = self._at if self.in_row > 1 else now
        self._at = now
        self._probe_at = math.inf
        return self._pause(now + pause_s, now)

    def paused_elsewhere(self, pause_s: float, now: float) -> None:
        """Note that another process was asked for a pause that has `pause_s` seconds left."""
        if now + pause_s > self.until:
            if now >= self.until:
                self._at = now
                self._probe_at = math.inf
            self._pause(now + pause_s, now)

    def tested_elsewhere(self, tested_s: float, now: float) -> None:
        """Note that another process tests for up to `tested_s` seconds whether the source accepts requests again. If
        that is 0, none does any more, and a pause ends that the source did not state to this process.
        """
        if tested_s > 0:
            self.until, self._probe_at = max(self.until, now + tested_s), math.inf
        elif self._tested_elsewhere:
            self.until, self.in_row = min(self.until, max(now, self._stated_until)), 0
        self._tested_elsewhere = tested_s > 0

    def answered(self, sent_at: float = math.inf) -> None:
        """Note an answer to a request sent at `sent_at`. It ends a pause that it was sent in. The growth starts anew if
        it was sent after the last pause but one began; older requests do not show that the source accepts any again.
        """
        self.accepted(sent_at)
        if sent_at > self._at:
            self.until = min(self.until, sent_at)

    def accepted(self, sent_at: float) -> None:
        """Note that a request sent at `sent_at` was not rejected, although it is not answered yet."""
        if sent_at > self._since:
            self.in_row = 0

    def _pause(self, until: float, now: float) -> float:
        self.until = until
        # A prolonged pause keeps the time of its probe.
        self._probe_at = min(self._probe_at, now + self._probe_after_s)
        return until - now


class Culprits:
    """Counts how many different samples must be to blame for the failures of a source since it last answered.

    Any call in a request may make it fail. So it counts failed requests of which no two share a sample. The count is
    never too high.
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


class Breaker:
    """Closed: every attempt may pass. Open for `pace_s` seconds. Half-open: one probe may pass, and its end decides."""

    def __init__(self, *, failures_to_open: float = FAILURES_TO_OPEN, pace_s: float = SHORTEST_PACE_S) -> None:
        self._failures_to_open = failures_to_open
        self.pace_s = pace_s
        """The least time between two probes, in seconds."""
        self.failures_in_row = 0
        self.failing = Culprits()
        """The samples that failed since the last answer."""
        self.probes = 0
        """Probes that failed, or were given up for the next one, since it opened."""
        self.closed = True
        """Whether every attempt may pass. An attribute and not a property, because each attempt asks seven times."""
        self.failed_at = -math.inf
        """When it opened, or a probe failed or became overdue; minus infinity if it is closed."""
        self._probing = False

    def wait_s(self, now: float) -> float:
        """Seconds until an attempt may pass; infinity while a probe is under way."""
        if self.closed:
            return 0.0
        if self._probing:
            return math.inf
        return max(0.0, self.failed_at + self.pace_s - now)

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
        self.failing = Culprits()
        self.failed_at = -math.inf
        self.probes = 0
        self._probing = False

    def failed(self, now: float, *, probe: bool, in_flight: int = 0, samples: Set[int] | None = None) -> bool:
        """Note a failure while `in_flight` other attempts are under way; return whether it opened just now.

        `probe`: the attempt started while the breaker was open. `samples`: the numbers of the samples that its request
        carried; None if each failure is that of another sample.
        """
        self.failures_in_row += 1
        if samples is not None:
            self.failing.add(samples)
        if probe and not self.closed:
            self.probes += 1
            self.open(now)
            return True
        several = samples is None or not in_flight or len(self.failing) >= SAMPLES_TO_OPEN
        enough = self.failures_in_row >= max(self._failures_to_open, SHARE_TO_OPEN * in_flight)
        return several and enough and self.trip(now)

    def trip(self, now: float) -> bool:
        """Open it for silence, refusals or invalid replies; return whether it was closed."""
        was_closed = self.closed
        if was_closed:
            self.open(now)
        return was_closed

    def opened_elsewhere(self) -> None:
        """Note that the circuit of another process is open. A probe may go here at once."""
        self.closed = False

    def abandoned(self, *, probe: bool) -> None:
        """Note that an attempt ended without evidence about the source (cancelled, throttled)."""
        if probe:
            self._probing = False

    def open(self, now: float) -> None:
        """Open it, or keep it open because a probe failed or is overdue. An overdue one may still answer."""
        self.closed = False
        self.failed_at = now
        self._probing = False
