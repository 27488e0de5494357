"""One limit per window of a source, on requests or on tokens: declared, or learned from the server (discovery.py).

One reply may come from a proxy or another deployment, or be provoked by its request, so a single reply never changes a
limit (promise P11). An announced limit applies while `REPLIES_NEEDED` of the last `REPLIES_KEPT` replies state it; of
several such limits the lowest applies.

A declared limit is never exceeded. A lower announced limit takes its place (`Ceiling`) until it is no longer announced,
or is refuted: after a window at the ceiling one request exceeds it, as a probe; after each rejected probe the wait
doubles, up to 16 windows. Two accepted probes in a row refute the ceiling. A token bucket accepts some that exceed its
rate, so `_REJECTIONS_NEEDED` rejections within a window put a refuted ceiling in its place again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Literal, TypeAlias

from .discovery import TOLERANCE, Discovery, Probe
from .ledger import Ledger

Unit: TypeAlias = Literal["requests", "tokens"]

REPLIES_NEEDED = 3
"""Number of replies that must announce the same limit before it applies."""
REPLIES_KEPT = 8
"""Number of recent replies whose announcements are kept."""
_PROBES_NEEDED = 2
_REJECTIONS_NEEDED = 3
_MAX_WAIT_WINDOWS = 16
_WITHDRAWN = 4096
"""Rejected requests that are remembered, in case the limit is declared later."""


class Announcements:
    """Records the limits that recent replies announced."""

    def __init__(self) -> None:
        self._recent: deque[float | None] = deque(maxlen=REPLIES_KEPT)

    def note(self, limit: float | None) -> float | None:
        """Record the limit that a reply announced; return the limit that applies now. None stands for no limit."""
        self._recent.append(limit)
        counts = Counter(self._recent)
        return min(
            (stated for stated, count in counts.items() if stated is not None and count >= REPLIES_NEEDED), default=None
        )


class Ceiling:
    """An announced limit below the declared one. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.limit = math.inf
        """The announced limit of all processes together; infinity if none below the declared one is announced."""
        self._refuted: float | None = None
        self._restored: float | None = None
        self._rejected_at: deque[float] = deque(maxlen=_REJECTIONS_NEEDED)
        self._probe_at = math.inf
        self._probing = False
        self._wait_windows = 1
        self._accepted_probes = 0

    def set(self, limit: float | None, *, declared: float, window_s: float, now: float) -> bool:
        """Set the ceiling to `limit`, or to none if that is None or not below `declared`; return whether it changed.

        A refuted limit is ignored until another one is announced.
        """
        if limit != self._refuted:
            self._refuted = None
        lower = limit if limit is not None and limit < declared and limit != self._refuted else math.inf
        if lower == self.limit:
            return False
        self.limit = lower
        self._wait_windows = min(2 * self._wait_windows, _MAX_WAIT_WINDOWS) if lower == self._restored else 1
        self._accepted_probes = 0
        self._probe_at = now + self._wait_windows * window_s if lower < math.inf else math.inf
        return True

    def rejected(self, now: float, window_s: float) -> None:
        """Record that the source rejected a request. After several, a refuted limit is no longer ignored."""
        if self._refuted is None:
            return
        self._rejected_at.append(now)
        if len(self._rejected_at) == _REJECTIONS_NEEDED and now - self._rejected_at[0] <= window_s:
            self._restored, self._refuted = self._refuted, None
            self._rejected_at.clear()

    def probe_in_s(self, now: float) -> float:
        """Seconds until one request may exceed the ceiling; infinity if a probe is in flight or there is no ceiling."""
        return math.inf if self._probing else max(0.0, self._probe_at - now)

    def probe_sent(self) -> None:
        """Record that a probe was sent: a request that exceeds the ceiling."""
        self._probing = True

    def probe_ended(self, now: float, *, sent: bool, rejected: bool, window_s: float) -> bool:
        """Record the end of the probe; return whether it refutes the ceiling.

        `sent`: the request reached the source. `rejected`: the source answered that a limit is exceeded.
        """
        self._probing = False
        if rejected:
            self._accepted_probes = 0
            self._wait_windows = min(2 * self._wait_windows, _MAX_WAIT_WINDOWS)
            self._probe_at = now + self._wait_windows * window_s
            return False
        self._probe_at = now
        self._accepted_probes += sent
        if self._accepted_probes < _PROBES_NEEDED or self.limit == math.inf:
            return False
        self._refuted, self.limit = self.limit, math.inf
        self._probe_at = math.inf
        return True

    def abandon(self, now: float) -> None:
        """Drop a probe in flight, because its event loop was closed."""
        if self._probing:
            self._probing = False
            self._probe_at = now


class WindowLimit:
    """What a source allows per window, and what was spent of it. Times are seconds of one monotonic clock."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._learns = Discovery
        self.ledger = Ledger()
        self.discovery: Discovery | None = None
        """What was learned of the limit; None if it is declared."""
        self.part = math.inf
        """This process's part of the declared limit; infinity if none is declared."""
        self.whole = math.inf
        """The declared limit of all processes together."""
        self.window_s = 0.0
        """Length of the configured window in seconds."""
        self._announcements = Announcements()
        self._ceiling = Ceiling()
        self._withdrawn: deque[tuple[int, float]] = deque(maxlen=_WITHDRAWN)

    @property
    def learned_per_minute(self) -> float | None:
        """The learned limit per minute; None if none is learned."""
        return self.discovery.per_minute if self.discovery is not None else None

    @property
    def factor(self) -> float:
        """The lower limit that the server announces, as a part of the declared one; 1 if it announces none."""
        return min(1.0, self._ceiling.limit / self.whole) if self.whole else 1.0

    def declare(self, part: float, whole: float, window_s: float, now: float) -> None:
        """Change the declared limit; infinity: none, and it is learned from now on. What was spent stays spent."""
        if part < math.inf:
            # Rejected requests count at a declared limit.
            for entry, amount in self._withdrawn:
                self.ledger.amend(entry, amount)
            self._withdrawn.clear()
        if part < math.inf or self.discovery is None:
            self.ledger.limit = part
            self.ledger.change_window(window_s, now)
        self.part, self.whole, self.window_s = part, whole, window_s
        if part < math.inf:
            self.discovery = None
        elif self.discovery is None:
            self.discovery = self._learns(self.ledger, self.unit, window_s)

    def learn_by(self, kind: type[Discovery]) -> None:
        """Learn an undeclared limit in another way from now on. What was learned is forgotten."""
        self._learns = kind
        if self.discovery is not None and type(self.discovery) is not kind:
            self.ledger.limit = math.inf
            self.discovery = kind(self.ledger, self.unit, self.discovery.window_s)

    def keep_to_ceiling(self) -> None:
        """Scale this process's part of the declared limit down to the lower limit that the server announces."""
        if self.part < math.inf:
            scaled = self.part * self.factor
            if self.unit == "requests":
                scaled = max(min(self.part, 1.0), math.floor(scaled + 1e-9))
            self.ledger.limit = scaled

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` may be sent; infinity if that is never, or unknown."""
        if self.discovery is not None:
            return self.discovery.wait_s(amount, now)
        ledger, ceiling = self.ledger, self._ceiling
        if ceiling.limit == math.inf:
            return ledger.wait_s(amount, now)
        wait = ledger.wait_s(min(amount, ledger.limit) if ledger.limit >= 1 else amount, now)
        if wait <= 0 or ceiling.probe_in_s(now) == math.inf:
            return wait
        kept, ledger.limit = ledger.limit, self.part
        try:
            return min(wait, max(ledger.wait_s(amount, now), ceiling.probe_in_s(now)))
        finally:
            ledger.limit = kept

    def capacity(self, until: float, amount: float, now: float) -> float:
        """Return how many requests of `amount` each may be sent in [now, until]; infinity without a limit."""
        largest = amount if self.discovery is None else self.discovery.largest(amount)
        return self.ledger.capacity(until, largest, now)

    def reserve(self, amount: float, now: float) -> Probe:
        """Reserve `amount`. Return how its request relates to a learned or announced limit."""
        probe: Probe = ""
        if self.discovery is not None:
            if self.discovery.origin:
                probe = self.discovery.reserved(amount, now)
        elif self._ceiling.limit < math.inf and self.ledger.wait_s(min(amount, self.ledger.limit), now) > 0:
            self._ceiling.probe_sent()
            probe = "probe"
        self.ledger.held += amount
        return probe

    def withdraw(self, entry: int, amount: float) -> None:
        """Remove a rejected request from the ledger of an undeclared limit."""
        if self.discovery is not None and entry >= 0:
            self.ledger.amend(entry, -amount)
            self._withdrawn.append((entry, amount))

    def ended(self, now: float, sent_at: float, rejected: bool, probe: Probe) -> str | None:
        """Record the end of a request; see `Discovery.ended`. Return a log message if the limit changed."""
        if self.discovery is not None:
            if not self.discovery.origin:
                return None
            return self.discovery.ended(now, sent_at=sent_at, rejected=rejected, probe=probe)
        if not probe:
            return None
        announced, sent = self._ceiling.limit, sent_at > -math.inf
        if not self._ceiling.probe_ended(now, sent=sent, rejected=rejected, window_s=self.window_s):
            return None
        return f"accepted more than the announced {announced:g} {self.unit}: back to the declared limit"

    def announced(self, announced: Mapping[str, float], *, in_flight: float, processes: int, now: float) -> str | None:
        """Apply the limit that a reply announced (`Reply.announced`). Return a log message if the limit changed.

        `in_flight` is the amount that this process has in flight. `processes` use the source.
        """
        limit, remaining = announced.get(f"{self.unit}_per_window"), announced.get(f"{self.unit}_remaining")
        if limit is None or limit < 1 or (remaining is not None and remaining > limit):
            limit = remaining = None  # none, or inconsistent
        if self.discovery is None:
            return self._lower(limit, remaining, announced.get(f"{self.unit}_reset_s"), in_flight, now)
        if self._announcements.note(limit) != limit or limit is None:
            return None
        reset_s = announced.get(f"{self.unit}_reset_s")
        return self.discovery.announced(limit, remaining, reset_s, in_flight=in_flight, share=processes, now=now)

    def _lower(
        self, limit: float | None, remaining: float | None, reset_s: float | None, in_flight: float, now: float
    ) -> str | None:
        """Record what a reply announces of a declared limit; return a log message if that changes the ceiling."""
        if (
            limit is not None
            and remaining is not None
            and limit < self.whole
            and not _refills(limit, limit - remaining, reset_s, self.window_s)
        ):
            ours, theirs = self.ledger.spent(now) - in_flight, limit - remaining
            if ours > theirs + max(2.0, 0.1 * theirs):
                limit = None  # the server counts over a shorter window
            elif remaining > limit / 2:
                return None  # too little is used to tell which window it counts
        ceiling, declared = self._ceiling, self.whole
        if not ceiling.set(self._announcements.note(limit), declared=declared, window_s=self.window_s, now=now):
            return None
        if ceiling.limit == math.inf:
            return f"no lower limit of {self.unit} announced any more: back to the declared {declared:g}"
        lower = f"announced limit of {ceiling.limit:g} {self.unit}"
        return f"{lower} is below the declared {declared:g}: the lower one applies"

    def rejected(self, now: float) -> None:
        """Record that the source answered that a limit is exceeded."""
        self._ceiling.rejected(now, self.window_s)

    def forget_in_flight(self, now: float) -> None:
        """Count all requests in flight as ended, after their event loop was closed."""
        self.ledger.stamp_all(now)
        self._ceiling.abandon(now)
        if self.discovery is not None:
            self.discovery.abandon(now)


def _refills(limit: float, used: float, reset_s: float | None, window_s: float) -> bool:
    """Return whether an announcement is that of a token bucket which refills `limit` in `window_s` seconds.

    Its reset is the time that refills what is used. A server rounds `remaining` down, so up to 1 less may be used.
    """
    if reset_s is None or used < 1:
        return False
    at_least, at_most = (used - 1) * window_s / limit, used * window_s / limit
    return at_least * (1 - TOLERANCE) <= reset_s <= at_most * (1 + TOLERANCE) and reset_s > 0
