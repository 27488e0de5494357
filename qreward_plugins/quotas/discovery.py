"""What was found out of one undeclared limit per window, from the server's headers and from its 429s.

An announced limit is believed when it is first said and when it changes; a 429 is believed more. A 429 that asks for a
pause as long as only a window needs sets the limit to what was really accepted in the window that ends now: throttled
requests do not count, and requests that were in flight and turn out throttled are taken off later.

What was learned may be wrong: a storm of 429s looks like a small limit, a header may be stale or mean another window.
So every learned limit can be refuted, by one request at a time that it forbids (a probe). One goes when the server's
own word (Retry-After, or the reset of a limit with nothing remaining) says that there is room and the ledger clearly
disagrees; one goes to confirm a limit measured from 429s, as soon as the server accepts requests again; and one goes
after a whole window at the limit without a 429, then after 2, 4, 8, 16. A probe that is throttled costs one request and
doubles the patience. (A probe goes a second too early at least: a moment too early proves nothing, because it lies
within the ledger's margin. Where slots recycle all the time, so that for a whole window no request would be that early,
a few requests run up to it.) A probe that is accepted refutes the limit: the one
before a storm comes back, or none, and the next 429 measures anew. Small steps would be as slow as they are polite: a
window is a minute long.

While the limit is the announced one, the server's books correct ours: what it says remains, remains. This is what makes
buckets and windows of other lengths work without knowing which they are.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from .ledger import Ledger

WINDOW_S = 60.0
"""The window of a limit whose window nobody tells."""

_CONTRADICTION_S = 1.0
_LONGEST_PATIENCE_WINDOWS = 16
_WINDOWS_S = (1.0, 10.0, 60.0, 3600.0, 86400.0)
_TOLERANCE = 0.1
_DOUBTS = 2
_WITNESSES = 3
LONGEST_STOP_S = 60.0
"""Seconds without a request after which one goes, even within a longer learned window: a header may be absurd."""


Origin: TypeAlias = Literal["", "announced", "throttled"]
Probe: TypeAlias = Literal["", "run-up", "probe"]
"""What a request is to a learned limit: allowed by it, a little ahead of it, or clearly forbidden by it."""


class Discovery:
    """The learned limit of one ledger. `unit` names what is limited, for people ("requests", "tokens")."""

    __slots__ = (
        "_accepted",
        "_announced",
        "_before",
        "_before_origin",
        "_bucket",
        "_corrected",
        "_doubts",
        "_longest_reset_s",
        "_patience",
        "_probing",
        "_refills",
        "_reserved_at",
        "_resets_since",
        "_test_at",
        "_unit",
        "_window_said",
        "_word_at",
        "learned_at",
        "ledger",
        "origin",
        "refused",
        "refuted_at",
        "window_s",
    )

    def __init__(self, ledger: Ledger, unit: str, window_s: float = WINDOW_S) -> None:
        self.ledger = ledger
        self.origin: Origin = ""
        """Where the limit comes from: "announced", "throttled", or empty while there is none."""
        self.window_s = window_s
        self.learned_at = -math.inf
        self._unit = unit
        self._announced: float | None = None
        self._before = math.inf
        self._before_origin: Origin = ""
        self._accepted = True
        self._word_at = math.inf
        self._test_at = math.inf
        self._patience = 1
        self._probing = False
        self.refused = False
        """Whether a probe was throttled, and its 429 is not taken in yet."""
        self.refuted_at = -math.inf
        self._doubts = 0
        self._refills = False
        self._corrected = False
        self._resets_since = math.inf
        self._longest_reset_s = 0.0
        self._bucket: tuple[float, float] | None = None
        self._reserved_at = -math.inf
        self._window_said: tuple[float, int] = (0.0, 0)

    @property
    def per_minute(self) -> float | None:
        """The learned limit; None: nothing is learned."""
        return self.ledger.limit * 60.0 / self.window_s if self.origin else None

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be sent. More than the limit goes when nothing else is in the window: a limit
        that may be wrong must not make a request impossible.
        """
        wait = self.ledger.wait_s(min(amount, self.ledger.limit), now)
        if wait <= 0 or self._probing:
            return wait
        if self.window_s > LONGEST_STOP_S:
            wait = min(wait, max(0.0, max(self._reserved_at, self.learned_at) + LONGEST_STOP_S - now))
        if wait > _CONTRADICTION_S:
            wait = min(wait, max(0.0, self._word_at - now))
            return min(wait, max(0.0, self._test_at - now))
        return min(wait, max(0.0, self._test_at + self.window_s - now))

    def reserved(self, amount: float, now: float) -> Probe:
        """Note that `amount` is about to be held; return whether it goes although the limit forbids it."""
        wait = self.ledger.wait_s(min(amount, self.ledger.limit), now)
        self._reserved_at = now
        if wait > _CONTRADICTION_S:
            self._probing = True
            self._word_at = self._test_at = math.inf
            return "probe"
        if now >= self._word_at:
            self._word_at = math.inf  # the ledger agreed with the server
        return "run-up" if wait > 0 else ""

    def ended(self, now: float, *, sent_at: float, rejected: bool, probe: Probe) -> str | None:
        """Note the end of a request that was sent at `sent_at` (minus infinity: it was not). Words where that changed
        something.
        """
        if probe == "probe":
            self._probing = False
        if probe and rejected:
            self.refused = True
            if not now < self._test_at < math.inf:
                self._test_at = now + self._patience * self.window_s
                self._patience = min(2 * self._patience, _LONGEST_PATIENCE_WINDOWS)
        elif probe == "probe":
            if sent_at > -math.inf:
                self._doubts += 1
                if self.origin == "throttled" or self._doubts >= _DOUBTS:
                    return self._refute(now)
            self._test_at = now  # its headers may tell that there was room, else another probe will
        elif not rejected and not self._accepted and sent_at > self.learned_at:
            self._accepted = True
            if self.origin == "throttled":
                self._test_at = min(self._test_at, now)
        return None

    def throttled(self, now: float, *, sent_at: float, pause_s: float, since: float) -> str | None:
        """Learn from a 429 whose request is off the ledger already and that asks for a pause of a window.

        `since`: when the server began to throttle.
        """
        if self.refused:
            self.refused = False
            self._word_at = now + pause_s
            confirmed = self.origin == "throttled" and self._patience == 2
            return (
                f"its limit is really {self.ledger.limit:g} {self._unit} in {self.window_s:g} s" if confirmed else None
            )
        if sent_at <= self.learned_at:
            if self.origin == "throttled":
                self.ledger.limit = max(1.0, self.ledger.limit - 1.0)
            return None
        self._word_at = now + pause_s
        if self._accepted:
            self._before, self._before_origin = self.ledger.limit, self.origin
        accepted = math.floor(self.ledger.since(since - self.window_s))
        self.ledger.limit = max(1.0, accepted)
        self.origin = "throttled"
        self.learned_at = now
        self._accepted = False
        self._patience = 1
        self._test_at = math.inf
        if accepted < 1:
            return f"it throttles, and accepted nothing in the last {self.window_s:g} s: one request at a time tries it"
        return (
            f"it accepted {self.ledger.limit:g} {self._unit} in the last {self.window_s:g} s before it throttled:"
            " taken to be its limit"
        )

    def announced(
        self, limit: float, remaining: float | None, reset_s: float | None, *, in_flight: float, share: int, now: float
    ) -> str | None:
        """Take in what a reply announced; `share` processes use the source, this one with `in_flight` under way."""
        words = None
        if limit != self._announced:
            self._announced = limit
            ours = max(1.0, math.floor(limit / share))
            if self.origin != "throttled" or ours < self.ledger.limit:
                self.ledger.limit = ours
                self.origin = "announced"
                self.learned_at = now
                self._patience = 1
                self._test_at = now + self.window_s
                self._resets_since = now
                words = f"it announces a limit of {limit:g} {self._unit} in {self.window_s:g} s"
        if self.origin != "announced" or remaining is None:
            return words
        used = max(0.0, limit - remaining)
        if reset_s is not None:
            told_s = self._window_told(limit, used, reset_s, now)
            if told_s is not None and told_s > self.window_s:
                # A longer window can stop a source for long, so several replies have to state it.
                said_s, times = self._window_said
                self._window_said = (told_s, times + 1 if told_s == said_s else 1)
                if self._window_said[1] < _WITNESSES:
                    told_s = None
            elif told_s is None:
                self._window_said = (0.0, 0)
            if told_s is not None and told_s != self.window_s:
                self.window_s = told_s
                self.ledger.change_window(told_s, now)
                self._test_at = now + self._patience * told_s
                words = f"it announces a limit of {limit:g} {self._unit} in {told_s:g} s"
        if used + in_flight < self.ledger.limit and self.ledger.forgive(used + in_flight, now):
            self._doubts = 0
            self._corrected = True
            self._test_at = max(self._test_at, now + self._patience * self.window_s)
        if remaining < 1 and reset_s is not None and not self._probing:
            # A bucket has room again long before it is full.
            self._word_at = now + (self.window_s / limit if self._refills else reset_s)
        return words

    def _refute(self, now: float) -> str:
        refuted = self.ledger.limit
        back = self._before > refuted and self._before_origin != ""
        self.refuted_at = now
        self.ledger.limit, self.origin = (self._before, self._before_origin) if back else (math.inf, "")
        self._before, self._before_origin = math.inf, ""
        self._doubts = 0
        self._patience = 1
        self._accepted = True
        self._word_at = self._test_at = math.inf
        if self.origin:
            self._test_at = now + self.window_s
        again = f"back to {self.ledger.limit:g}" if self.origin else "no limit until it throttles again"
        return f"it takes more than {refuted:g} {self._unit} in {self.window_s:g} s: {again}"

    def _window_told(self, limit: float, used: float, reset_s: float, now: float) -> float | None:
        """The window that announcements tell: seconds, or None where they tell none.

        A bucket says how long it takes to fill what is used (of 5000, 1 used: 12 ms), so `limit / used` times that is
        its window. Others say how long until all is free, which happens to look the same for one value of `used`, and
        not for twice as much. Of those the window is at least that long; and it is no longer where that was never
        more in a whole window, while the server's books had to correct ours.
        """
        if used >= 1:
            refill_s = reset_s * limit / used
            window_s = next((known for known in _WINDOWS_S if abs(refill_s / known - 1.0) <= _TOLERANCE), None)
            if window_s is None or self._bucket is None or self._bucket[0] != window_s:
                self._bucket = (window_s, used) if window_s is not None else None
                self._refills = False
            elif not self._bucket[1] / 2 < used < self._bucket[1] * 2:
                self._refills = True
        if self._refills and self._bucket is not None:
            return self._bucket[0]
        if reset_s > self.window_s * (1 + _TOLERANCE):
            self._resets_since = now
            return next((window_s for window_s in _WINDOWS_S if window_s * (1 + _TOLERANCE) >= reset_s), None)
        self._longest_reset_s = max(self._longest_reset_s, reset_s)
        if now - self._resets_since < self.window_s:
            return None
        longest_s, corrected = self._longest_reset_s, self._corrected
        self._resets_since, self._longest_reset_s, self._corrected = now, 0.0, False
        return (
            next((window_s for window_s in _WINDOWS_S if window_s * (1 + _TOLERANCE) >= longest_s), None)
            if corrected
            else None
        )

    def abandon(self, now: float) -> None:
        """Forget a probe under way: its event loop was closed."""
        if self._probing:
            self._probing = False
            self._test_at = now
