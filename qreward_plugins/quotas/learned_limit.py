"""A limit that nobody declared, in a process that shares its source with others: the keeper learns it for all of them.

One worker's 429 says how much all workers together have sent, so no worker can learn from it alone. This process tells
the keeper what it hears (`take`): 429s that a window explains, announcements, and how probes ended. The keeper runs one
`Discovery` for all workers (sharing/learning.py), and this process keeps to its share of what that learned. Until
something is learned there is no limit.

Only the worker whom the keeper asks to sends a probe: `extra` requests beyond its share.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

from .discovery import Discovery, Origin, Probe
from .window_limit import Ledger

Probed: TypeAlias = Literal["", "accepted", "rejected", "unused"]
"""How a probe ended; "" if none did."""
_MOST_THROTTLED = 64


class Heard(NamedTuple):
    """What a worker heard of a limit since its last report. Times are seconds before the report."""

    throttled: tuple[tuple[float, float, float], ...] = ()
    """429s that a window explains: when their requests were sent, the pause in seconds, and since when the source
    accepts nothing."""
    accepted_s: float = math.inf
    """When the latest of the requests was sent that were accepted; infinity if none was."""
    probed: Probed = ""
    probe_id: float = 0.0
    probed_s: float = math.inf
    """When the last request of the probe was sent."""
    room_in_s: float = math.inf
    """Seconds after which the source says that there is room again, if it rejected the probe."""
    announced: tuple[float, float | None, float | None, float] | None = None
    """The limit of the latest announcement, what is left of it, seconds until it is reset, and what is in flight."""


class Learned(NamedTuple):
    """What the keeper has learned of a limit: of all workers together."""

    limit: float = math.inf
    window_s: float = 60.0
    origin: Origin = ""
    probe_id: float = 0.0
    """Identifies the probe that the worker is to send; 0: none. It is told until the worker says how it ended."""
    extra: int = 0
    """Requests of the probe, beyond the worker's share."""


class LearnedLimit(Discovery):
    """A process's part of a limit that the keeper learns. `share` is set by `resize`."""

    def __init__(self, ledger: Ledger, unit: str, window_s: float = 60.0) -> None:
        super().__init__(ledger, unit, window_s)
        self.whole = math.inf
        """The learned limit of all workers together; infinity if none is learned."""
        self.known = False
        """Whether the keeper learns this limit: some worker has heard of it."""
        self.extra = 0
        """Requests that may be sent beyond the share, as a probe."""
        self.urgent = False
        """Whether the keeper should know at once what was heard."""
        self._stated: float | None = None
        self._probe_id = 0.0
        self._probes = 0
        self._forget()

    def _forget(self) -> None:
        self._throttled: list[tuple[float, float, float]] = []
        self._accepted_at = -math.inf
        self._probed: Probed = ""
        self._probed_at = -math.inf
        self._room_at = math.inf
        self._latest: tuple[float, float | None, float | None, float] | None = None
        self.urgent = False

    @property
    def per_minute(self) -> float | None:
        return self.whole * 60.0 / self.window_s if self.origin else None

    def learn(self, learned: Learned, now: float) -> bool:
        """Take over what the keeper has learned; return whether that is new."""
        self.known = True
        if learned.probe_id and learned.probe_id != self._probe_id:
            self._probe_id, self.extra, self._probes = learned.probe_id, learned.extra, 0
        if learned[:3] == (self.whole, self.window_s, self.origin):
            return False
        self.whole = learned.limit
        if learned.window_s != self.window_s:
            self.window_s = learned.window_s
            self.ledger.change_window(learned.window_s, now)
        if self.origin and not learned.origin:
            self.refuted_at = now
        self.origin = learned.origin
        return True

    def take(self, now: float) -> Heard:
        """Return what was heard since the last call."""
        heard = Heard(
            tuple((now - sent_at, pause_s, now - since) for sent_at, pause_s, since in self._throttled),
            now - self._accepted_at,
            self._probed,
            self._probe_id,
            now - self._probed_at,
            max(0.0, self._room_at - now),
            self._latest,
        )
        self._forget()
        return heard

    def give_back(self) -> None:
        """Give a probe back that has not been sent, because nothing waits for it any more."""
        if self.extra:
            self.extra = 0
            self._end_probe("unused")

    def largest(self, amount: float) -> float:
        return min(amount, self.whole)

    def wait_s(self, amount: float, now: float) -> float:
        return 0.0 if self.extra else self.ledger.wait_s(self.largest(amount), now)

    def reserved(self, amount: float, now: float) -> Probe:
        if not self.extra or self.ledger.wait_s(self.largest(amount), now) <= 0:
            return ""
        self.extra -= 1
        self._probes += 1
        return "probe"

    def ended(self, now: float, *, sent_at: float, rejected: bool, probe: Probe) -> str | None:
        if probe:
            self._probes = max(0, self._probes - 1)
            self._probed_at = max(self._probed_at, sent_at)
            self.probe_rejected = self.probe_rejected or rejected
            if rejected:
                self.extra = 0
                self._end_probe("rejected")
            elif not self.extra and not self._probes:
                self._end_probe("accepted" if self._probed_at > -math.inf else "unused")
        elif not rejected:
            self._accepted_at = max(self._accepted_at, sent_at)
        return None

    def throttled(self, now: float, *, sent_at: float, pause_s: float, since: float) -> str | None:
        if self.probe_rejected:
            self.probe_rejected = False
            self._room_at = now + pause_s
        elif len(self._throttled) < _MOST_THROTTLED:
            self.known = self.urgent = True
            self._throttled.append((sent_at, pause_s, since))
        return None

    def announced(
        self, limit: float, remaining: float | None, reset_s: float | None, *, in_flight: float, share: int, now: float
    ) -> str | None:
        self._latest = limit, remaining, reset_s, in_flight
        if limit != self._stated:
            self._stated = limit
            self.known = self.urgent = True
        return None

    def abandon(self, now: float) -> None:
        if self.extra or self._probes:
            self.extra = self._probes = 0
            self._end_probe("unused")

    def _end_probe(self, how: Probed) -> None:
        if self._probed != "rejected":
            self._probed = how
        self.urgent = True
