"""Learns one undeclared limit per window from the server's headers and 429s.

An announced limit is applied when it is first stated and when it changes. A limit measured from 429s takes precedence:
a 429 whose pause is as long as a window sets the limit to the amount accepted in the last window. Rejected requests do
not count, and requests in flight that are rejected later are subtracted then.

A learned limit may be wrong: a 429 storm looks like a small limit, and a header may be stale or mean another window. So
single requests that exceed the limit (probes) test it. A probe is sent

- when the server says that there is room (Retry-After, or the reset of a limit with nothing remaining) and the ledger
  clearly disagrees;
- to confirm a limit measured from 429s, as soon as the server accepts requests again;
- after one window at the limit without a 429, then after 2, 4, 8 and 16 windows.

A rejected probe costs one request and doubles the wait for the next. An accepted probe refutes the limit: there is none
until the next 429, which starts a new measurement, or the next announcement. The limit is not raised in small steps,
because each step would take a window of a minute.

A probe is at least one second early by the ledger, because less is within the ledger's margin. If requests leave the
window so steadily that none would be a second early, a few early requests lead up to the probe (run-up).

While the limit is an announced one, the server's `remaining` corrects the ledger. This covers buckets and windows of
other lengths without knowing which of them the server uses.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol, TypeAlias

WINDOW_S = 60.0
"""Window in seconds of a limit whose window is unknown."""

_PROBE_EARLY_S = 1.0
"""Least seconds by which a probe is early: less is within the margin of the ledger."""
_MAX_WAIT_WINDOWS = 16
"""Longest wait before a probe, in windows."""
_WINDOWS_S = (1.0, 10.0, 60.0, 3600.0, 86400.0)
"""Windows that providers use."""
TOLERANCE = 0.1
"""Share by which an announced time may differ from that of a known window."""
_PROBES_NEEDED = 2
"""Accepted probes that refute an announced limit."""
_REPLIES_NEEDED = 3
"""Replies in a row that must state a longer window before it is used."""
LONGEST_STOP_S = 60.0
"""Seconds without a request after which one is sent even within a longer learned window: a header may be absurd."""


Origin: TypeAlias = Literal["", "announced", "throttled"]
Probe: TypeAlias = Literal["", "run-up", "probe"]
"""How a request relates to a learned limit: allowed (empty), slightly early ("run-up"), or clearly exceeding it."""


class Spending(Protocol):
    """What was spent of a limit, as a `Ledger` keeps it."""

    limit: float

    def wait_s(self, amount: float, now: float) -> float: ...
    def since(self, moment: float) -> float: ...
    def remove_oldest(self, down_to: float, now: float) -> bool: ...
    def change_window(self, window_s: float, now: float) -> None: ...


class Discovery:
    """The learned limit of one ledger. `unit` is what it limits, for log messages ("requests", "tokens")."""

    def __init__(self, ledger: Spending, unit: str, window_s: float = WINDOW_S) -> None:
        self.ledger = ledger
        self.origin: Origin = ""
        """Origin of the limit: "announced", "throttled", or empty if there is none."""
        self.window_s = window_s
        self.learned_at = -math.inf
        self._rejected_at = -math.inf
        """Time of the last 429. A probe from before may have taken the place of the request that got it."""
        self._unit = unit
        self._announced: float | None = None
        self._accepted = True
        self._room_at = math.inf
        self._test_at = math.inf
        self._wait_windows = 1
        self._probing = False
        self.probe_rejected = False
        """Whether a probe was rejected and `throttled` has not been called for it yet."""
        self.refuted_at = -math.inf
        self._accepted_probes = 0
        self._refills = False
        self._bucket: tuple[float, float] | None = None
        self._reserved_at = -math.inf
        self._window_stated: tuple[float, int] = (0.0, 0)

    @property
    def per_minute(self) -> float | None:
        """The learned limit per minute; None if none is learned."""
        return self.ledger.limit * 60.0 / self.window_s if self.origin else None

    def adopt(self, now: float) -> None:
        """Take over the ledger's limit from an earlier keeper, and test it after one window."""
        self.origin, self.learned_at, self._test_at = "throttled", now, now + self.window_s

    def room_seen(self, now: float, *, late: bool) -> None:
        """Test the limit at once: the server counts less than the ledger, which cannot be corrected. `late`: maybe only
        because requests have not reached it yet, so probes that it accepts do not show that the limit is wrong.
        """
        self._room_at = min(self._room_at, now)
        if late:
            self._accepted_probes = 0

    def test_due(self, now: float) -> bool:
        """Return whether a probe may be due now; `wait_s` decides."""
        return not self._probing and now >= min(self._room_at, self._test_at)

    def largest(self, amount: float) -> float:
        """Return what a request of `amount` takes of the limit: a learned limit may be wrong, and must not make a
        request impossible.
        """
        return min(amount, self.ledger.limit)

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` may be sent; if it is above the limit, until the window is empty."""
        wait = self.ledger.wait_s(self.largest(amount), now)
        if wait <= 0 or self._probing:
            return wait
        if self.window_s > LONGEST_STOP_S:
            wait = min(wait, max(0.0, max(self._reserved_at, self.learned_at) + LONGEST_STOP_S - now))
        if wait > _PROBE_EARLY_S:
            wait = min(wait, max(0.0, self._room_at - now))
            return min(wait, max(0.0, self._test_at - now))
        return min(wait, max(0.0, self._test_at + self.window_s - now))

    def reserved(self, amount: float, now: float) -> Probe:
        """Record that `amount` is about to be reserved; return how its request relates to the limit."""
        wait = self.ledger.wait_s(min(amount, self.ledger.limit), now)
        self._reserved_at = now
        if wait > _PROBE_EARLY_S:
            self._probing = True
            self._room_at = self._test_at = math.inf
            return "probe"
        if now >= self._room_at:
            self._room_at = math.inf  # the ledger agreed with the server
        return "run-up" if wait > 0 else ""

    def ended(self, now: float, *, sent_at: float, rejected: bool, probe: Probe) -> str | None:
        """Record the end of a request that was sent at `sent_at` (minus infinity if it was not sent). Return a log
        message if the limit changed.
        """
        if rejected:
            self._rejected_at = now
        if probe == "probe":
            self._probing = False
        if probe and rejected:
            self.probe_rejected = True
            if not now < self._test_at < math.inf:
                self._test_at = now + self._wait_windows * self.window_s
                self._wait_windows = min(2 * self._wait_windows, _MAX_WAIT_WINDOWS)
        elif probe == "probe":
            if sent_at > self._rejected_at:
                self._accepted_probes += 1
                if self.origin == "throttled" or self._accepted_probes >= _PROBES_NEEDED:
                    return self._refute(now)
            self._test_at = now  # unless its headers show that there was room, another probe follows
        elif not rejected and not self._accepted and sent_at > self.learned_at:
            self._accepted = True
            if self.origin == "throttled":
                self._test_at = min(self._test_at, now)
        return None

    def throttled(self, now: float, *, sent_at: float, pause_s: float, since: float) -> str | None:
        """Learn from a 429 whose pause is as long as a window. Its request was removed from the ledger before.

        `since` is when the server began to throttle. Returns a log message if the limit changed or is confirmed.
        """
        if self.probe_rejected:
            self.probe_rejected = False
            self._room_at = now + pause_s
            confirmed = self.origin == "throttled" and self._wait_windows == 2
            if not confirmed:
                return None
            return f"measured limit confirmed: {self.ledger.limit:g} {self._unit} in {self.window_s:g} s"
        if sent_at <= self.learned_at:
            if self.origin == "throttled":
                self.ledger.limit = max(1.0, self.ledger.limit - 1.0)
            return None
        self._room_at = now + pause_s
        accepted = math.floor(self.ledger.since(since - self.window_s))
        self.ledger.limit = max(1.0, accepted)
        self.origin = "throttled"
        self.learned_at = now
        self._accepted = False
        self._wait_windows = 1
        self._test_at = math.inf
        if accepted < 1:
            return f"throttled, and no request accepted in the last {self.window_s:g} s: sending one request at a time"
        return (
            f"accepted at most {self.ledger.limit:g} {self._unit} in the last {self.window_s:g} s before a 429, with"
            " those not answered yet: using this as the limit, less one for each of them that gets a 429, too"
        )

    def announced(
        self, limit: float, remaining: float | None, reset_s: float | None, *, in_flight: float, share: int, now: float
    ) -> str | None:
        """Apply the limit that a reply announced; return a log message if that changed the limit or its window.

        `share` processes use the source; `in_flight` is the amount that this process has in flight.
        """
        message = None
        if limit != self._announced:
            self._announced = limit
            ours = max(1.0, math.floor(limit / share))
            if self.origin != "throttled" or ours < self.ledger.limit:
                self.ledger.limit = ours
                self.origin = "announced"
                self.learned_at = now
                self._wait_windows = 1
                self._test_at = now + self.window_s
                message = f"announced limit: {limit:g} {self._unit} in {self.window_s:g} s"
        if self.origin != "announced" or remaining is None:
            return message
        used = max(0.0, limit - remaining)
        if reset_s is not None:
            inferred_s = self._infer_window_s(limit, used, reset_s)
            if inferred_s is not None and inferred_s > self.window_s:
                # A longer window can stop a source for long, so several replies must state it.
                stated_s, times = self._window_stated
                self._window_stated = (inferred_s, times + 1 if inferred_s == stated_s else 1)
                if self._window_stated[1] < _REPLIES_NEEDED:
                    inferred_s = None
            elif inferred_s is None:
                self._window_stated = (0.0, 0)
            if inferred_s is not None and inferred_s != self.window_s:
                self.window_s = inferred_s
                self.ledger.change_window(inferred_s, now)
                self._test_at = now + self._wait_windows * inferred_s
                message = f"announced limit: {limit:g} {self._unit} in {inferred_s:g} s"
        if used + in_flight < self.ledger.limit and self.ledger.remove_oldest(used + in_flight, now):
            self._accepted_probes = 0
            self._test_at = max(self._test_at, now + self._wait_windows * self.window_s)
        if remaining < 1 and reset_s is not None and not self._probing:
            # A bucket has room again long before it is full.
            self._room_at = now + (self.window_s / limit if self._refills else reset_s)
        return message

    def _refute(self, now: float) -> str:
        refuted = self.ledger.limit
        if self.origin == "throttled":
            self._announced = None  # what is announced holds again
        self.refuted_at = now
        self.ledger.limit, self.origin = math.inf, ""
        self._accepted_probes = 0
        self._wait_windows = 1
        self._accepted = True
        self._room_at = self._test_at = math.inf
        return f"accepted more than {refuted:g} {self._unit} in {self.window_s:g} s: no limit until the next 429"

    def _infer_window_s(self, limit: float, used: float, reset_s: float) -> float | None:
        """Infer the window in seconds from announcements; None if they do not determine it.

        A token bucket announces the time to refill what is used (1 used of 5000: 12 ms), so its window is that time
        times `limit / used`. Other servers announce the time until everything is free. One value of `used` can look
        alike for both, two values that differ by a factor of two cannot.

        A window of the other kind is at least as long as every announced reset.
        """
        if used >= 1:
            refill_s = reset_s * limit / used
            window_s = next((known for known in _WINDOWS_S if abs(refill_s / known - 1.0) <= TOLERANCE), None)
            if window_s is None or self._bucket is None or self._bucket[0] != window_s:
                self._bucket = (window_s, used) if window_s is not None else None
                self._refills = False
            elif not self._bucket[1] / 2 < used < self._bucket[1] * 2:
                self._refills = True
        if self._refills and self._bucket is not None:
            return self._bucket[0]
        if reset_s > self.window_s * (1 + TOLERANCE):
            return next((window_s for window_s in _WINDOWS_S if window_s * (1 + TOLERANCE) >= reset_s), None)
        return None

    def abandon(self, now: float) -> None:
        """Drop a probe in flight, because its event loop was closed."""
        if self._probing:
            self._probing = False
            self._test_at = now
