"""Tells whether a 429 is due to the limits of its source or to its own sample.

Some servers answer a request that they will never accept, such as a too long one, with 429 (OpenAI: "Request too large
for ... on tokens per min"). If such a 429 paused its source or lowered its limits, one sample would take the source
from all others (promise P11). A server that has reached a limit throttles other samples, too, and accepts none that are
sent later. So a 429 counts for the source if another sample was throttled since the source last accepted a request. It
does not count if the source has throttled this sample before and has since accepted a later request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .jobs import ThrottledAt

if TYPE_CHECKING:
    from .attempts import Attempt

_ACCEPTED_AFTER_S = 0.1
"""Least age, in seconds, from which a request under way counts as accepted: servers reject at once."""
_MOST = 4
"""Number of samples that are remembered."""
_LEAST_TO_REFUSE = 6
"""Fewest 429s to a sample alone that are a refusal."""
_BY_CHANCE = 1e-5
"""A refusal is less probable than this for a sample that is throttled as often as others are."""


class ThrottledSamples:
    """The samples that a source throttles. Times are seconds of the event loop's clock."""

    __slots__ = ("_accepted", "_at", "_longest_s", "_rejections", "_samples", "_source", "accepted_at")

    def __init__(self, source: str) -> None:
        self._source = source
        self._samples: dict[int, tuple[int, float]] = {}
        """Throttled samples by number, no later request was accepted: order of the request, when it may go again."""
        self._at = -math.inf
        """Time of the last 429 that was not a repeated one to the same sample."""
        self._longest_s = 0.0
        """Longest time that a 429 took, in seconds."""
        self._rejections = 0
        """Number of 429s."""
        self._accepted = 0
        """Order of the last request that was accepted."""
        self.accepted_at = -math.inf
        """When it began."""

    def accepted(self, attempt: Attempt) -> None:
        """Note that a request was accepted."""
        if attempt.order > self._accepted:
            self._accepted, self.accepted_at = attempt.order, attempt.started_at

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
        times, first, before = (0, attempt.order, self._rejections) if last is None else last[3:]
        noted = ThrottledAt(attempt.order, now, alone, times + 1, first, before)
        job.throttled_at = {**job.throttled_at, self._source: noted}
        self._rejections += 1
        if again:
            return 0
        self._at = now
        self._samples = {number: one for number, one in self._samples.items() if one[0] > self._accepted}
        others = len(self._samples.keys() - samples)
        if others < _MOST:
            self._samples[job.sequence] = attempt.order, now + (retry_after_s or 0.0)
        return others if attempt.together == 1 else max(1, others)

    def refuses(self, attempt: Attempt, live: Iterable[Attempt], requests: int) -> bool:
        """Whether the source, to which `requests` were sent so far, will never accept the sample of `attempt`.

        While others are in flight, they may have taken its place. And others must have been accepted so often that this
        one cannot have been throttled each time by chance.
        """
        last = attempt.job.throttled_at.get(self._source)
        if last is None or last.alone < _LEAST_TO_REFUSE or any(other is not attempt for other in live):
            return False
        since = self._rejections - last.before
        accepted = requests - last.first_order + 1 - since
        rejected = since - last.times
        share = (rejected + 1) / (max(0, accepted) + rejected + 2)
        return share**last.alone < _BY_CHANCE

    def shortest_s(self, retry_after_s: float, now: float) -> float:
        """The shortest pause that a sample was told and that is not over, in seconds. A longer one may be due to its
        own sample.
        """
        return min((until - now for _, until in self._samples.values() if until > now), default=retry_after_s)


__all__ = ["ThrottledSamples"]
