"""Throttling: how long a source pauses after a 429, and whether that 429 is due to its limits or to its own sample.

A source pauses as long as it asks for, or growing from 429 to 429 if it states no time. A 429 that arrives during a
pause, or to a request that was sent before it began, neither starts a new pause nor adds growth. It prolongs the pause
only if it states a `Retry-After` that ends later.

One request probes the source every minute of a pause, or every second if the source states no time, and an answer ends
the pause. So an absurd `Retry-After` of one reply cannot keep all samples from the source.

Some servers answer a request that they will never accept, such as a too long one, with 429 (OpenAI: "Request too large
for ... on tokens per min"). If such a 429 paused its source or lowered its limits, one sample would take the source
from all others (promise P11). A server that has reached a limit throttles other samples, too, and accepts none that are
sent later. So a 429 counts for the source if another sample was throttled since the source last accepted a request. It
does not count if the source has throttled this sample before and has since accepted a later request.

A sample that an idle source throttles again and again is refused: the source will never accept it. A source that has
not answered what it accepted last is not idle. It may still work on a request that was cancelled here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .jobs import ThrottledAt

if TYPE_CHECKING:
    from .attempts import Attempt

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
_ACCEPTED_AFTER_S = 0.1
"""Least age, in seconds, from which a request under way counts as accepted: servers reject at once."""
_MOST = 4
"""Number of samples that are remembered."""
_REFUSED_AFTER = 7
"""429s to a sample alone, in a row, that are a refusal. A server that throttles half of all requests by chance does
this to one sample in 100."""


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


class ThrottledSamples:
    """The samples that a source throttles. Times are seconds of the event loop's clock."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._samples: dict[int, tuple[int, float]] = {}
        """Throttled samples by number, no later request was accepted: order of the request, when it may go again."""
        self._at = -math.inf
        """Time of the last 429 that was not a repeated one to the same sample."""
        self._longest_s = 0.0
        """Longest time that a 429 took, in seconds."""
        self._accepted = 0
        """Order of the last request that was accepted."""
        self._answered = 0
        """Order of the last request that was answered."""
        self.accepted_at = -math.inf
        """When it began."""

    def accepted(self, attempt: Attempt) -> None:
        """Note that a request was accepted."""
        if attempt.order > self._accepted:
            self._accepted, self.accepted_at = attempt.order, attempt.started_at

    def answered(self, attempt: Attempt) -> None:
        """Note that a request was answered."""
        self.accepted(attempt)
        self._answered = max(self._answered, attempt.order)

    def note(self, attempt: Attempt, live: Iterable[Attempt], retry_after_s: float | None, now: float) -> int:
        """Note a 429 that asks for a pause; return how many other samples are throttled, too. If none is, it may be due
        to its own sample. One to several calls together never is. `live`: the attempts under way at the source.

        `ThrottledAt.alone` counts how often a sample was throttled again while no other one was.
        """
        job, samples = attempt.job, attempt.samples
        self._longest_s = max(self._longest_s, now - attempt.started_at)
        accepted_after_s = max(_ACCEPTED_AFTER_S, 2 * self._longest_s)
        for other in live:
            if other.sent and other.sent_at <= now - accepted_after_s:
                self.accepted(other)
        last = job.throttled_at.get(self._source)
        again = last is not None and len(samples) == 1 and (last.order < self._accepted or last.alone > 0)
        alone = last.alone + (last.ended_at >= self._at) if last is not None and again else 0
        job.throttled_at = {**job.throttled_at, self._source: ThrottledAt(attempt.order, now, alone)}
        if again:
            return 0
        self._samples = {number: one for number, one in self._samples.items() if one[0] > self._accepted}
        others = len(self._samples.keys() - samples)
        if others or last is None:
            self._at = now
        if others < _MOST:
            self._samples[job.sequence] = attempt.order, now + (retry_after_s or 0.0)
        return others if attempt.together == 1 else max(1, others)

    def refuses(self, attempt: Attempt, live: Iterable[Attempt]) -> bool:
        """Whether the source will never accept the sample of `attempt`. While others are in flight, or were accepted
        last and never answered, they may have taken its place.
        """
        alone = attempt.job.throttled_alone(self._source)
        idle = self._answered >= self._accepted and all(other is attempt for other in live)
        return alone >= _REFUSED_AFTER and idle

    def shortest_s(self, retry_after_s: float, now: float) -> float:
        """The shortest pause that a sample was told and that is not over, in seconds. A longer one may be due to its
        own sample.
        """
        return min((until - now for _, until in self._samples.values() if until > now), default=retry_after_s)
