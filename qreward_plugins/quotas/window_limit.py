"""One limit per window of a source, on requests or on tokens: declared, or learned from the server (discovery.py).

One reply may come from a proxy or another deployment, or be provoked by its request, so a single reply never changes a
limit (promise P11). An announced limit applies while `REPLIES_NEEDED` of the last `REPLIES_KEPT` replies state it; of
several such limits the lowest applies.

A declared limit is never exceeded, and what a server announces does not change it: its window is not known. A lower one
is logged once.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from .discovery import Discovery, Probe
from .ledger import Ledger

Unit: TypeAlias = Literal["requests", "tokens"]

REPLIES_NEEDED = 3
"""Number of replies that must announce the same limit before it applies."""
REPLIES_KEPT = 8
"""Number of recent replies whose announcements are kept."""
_WITHDRAWN = 4096
"""Rejected requests that are remembered, in case the limit is declared later."""


class WindowLimit:
    """What a source allows per window, and what was spent of it. Times are seconds of one monotonic clock."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._learns = Discovery
        self.ledger = Ledger()
        self.wait_s: Callable[[float, float], float] = self.ledger.wait_s
        """Returns the seconds until an amount may be sent; infinity if that is never, or unknown. Each attempt asks
        several times, so it is the method of the ledger or of `discovery` itself."""
        self.discovery: Discovery | None = None
        """What was learned of the limit; None if it is declared. `_learn` sets it."""
        self.whole = math.inf
        """The declared limit of all processes together."""
        self.window_s = 0.0
        """Length of the configured window in seconds."""
        self._announced: deque[float | None] = deque(maxlen=REPLIES_KEPT)
        """What recent replies announced; None: nothing."""
        self._told = math.inf
        """The announced limit below the declared one of which the log has told."""
        self._withdrawn: deque[tuple[int, float]] = deque(maxlen=_WITHDRAWN)

    @property
    def learned_per_minute(self) -> float | None:
        """The learned limit per minute; None if none is learned."""
        return self.discovery.per_minute if self.discovery is not None else None

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
        self.whole, self.window_s = whole, window_s
        if part < math.inf:
            self._learn(None)
        elif self.discovery is None:
            self._learn(self._learns(self.ledger, self.unit, window_s))

    def learn_by(self, kind: type[Discovery]) -> None:
        """Learn an undeclared limit in another way from now on. What was learned is forgotten."""
        self._learns = kind
        if self.discovery is not None and type(self.discovery) is not kind:
            self.ledger.limit = math.inf
            self._learn(kind(self.ledger, self.unit, self.discovery.window_s))

    def _learn(self, discovery: Discovery | None) -> None:
        self.discovery = discovery
        self.wait_s = (self.ledger if discovery is None else discovery).wait_s

    def capacity(self, until: float, amount: float, now: float) -> float:
        """Return how many requests of `amount` each may be sent in [now, until]; infinity without a limit."""
        largest = amount if self.discovery is None else self.discovery.largest(amount)
        return self.ledger.capacity(until, largest, now)

    def reserve(self, amount: float, now: float) -> Probe:
        """Reserve `amount`. Return how its request relates to a learned limit."""
        probe: Probe = ""
        if self.discovery is not None and self.discovery.origin:
            probe = self.discovery.reserved(amount, now)
        self.ledger.held += amount
        return probe

    def withdraw(self, entry: int, amount: float) -> None:
        """Remove a rejected request from the ledger of an undeclared limit."""
        if self.discovery is not None and entry >= 0:
            self.ledger.amend(entry, -amount)
            self._withdrawn.append((entry, amount))

    def ended(self, now: float, sent_at: float, rejected: bool, probe: Probe) -> str | None:
        """Record the end of a request; see `Discovery.ended`. Return a log message if the limit changed."""
        if self.discovery is None or not self.discovery.origin:
            return None
        return self.discovery.ended(now, sent_at=sent_at, rejected=rejected, probe=probe)

    def announced(self, announced: Mapping[str, float], *, in_flight: float, processes: int, now: float) -> str | None:
        """Apply the limit that a reply announced (`Reply.announced`). Return a log message if the limit changed.

        `in_flight` is the amount that this process has in flight. `processes` use the source.
        """
        limit, remaining = announced.get(f"{self.unit}_per_window"), announced.get(f"{self.unit}_remaining")
        if limit is None or limit < 1 or (remaining is not None and remaining > limit):
            limit = remaining = None  # none, or inconsistent
        self._announced.append(limit)
        agreed = [stated for stated, count in Counter(self._announced).items() if count >= REPLIES_NEEDED]
        if limit is None or min((stated for stated in agreed if stated is not None), default=None) != limit:
            return None
        if self.discovery is None:
            if limit >= self.whole or limit == self._told:
                return None
            self._told = limit
            return f"the server announces a limit of {limit:g} {self.unit}, below the declared {self.whole:g}"
        reset_s = announced.get(f"{self.unit}_reset_s")
        return self.discovery.announced(limit, remaining, reset_s, in_flight=in_flight, share=processes, now=now)

    def forget_in_flight(self, now: float) -> None:
        """Count all requests in flight as ended, after their event loop was closed."""
        self.ledger.stamp(self.ledger.held, now)
        if self.discovery is not None:
            self.discovery.abandon(now)
