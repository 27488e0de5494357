"""Learns a limit that nobody declared, from what all workers hear: one `Discovery` for all of them.

It sees what each worker has spent, so a 429 at one worker measures what all together were allowed. The measurement
waits until each worker has reported after the 429. What was learned is divided as a declared limit is (division.py).

A probe goes to one worker at a time, and exceeds what all of them have not spent: a request that exceeds only its
worker's share says nothing about the limit. So before a probe all workers are asked what they have spent.

A restarted keeper takes over what the workers were told. Nothing here is needed to keep a declared limit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container

from ..quotas.discovery import Discovery
from ..quotas.learned_limit import Heard, Learned
from ..quotas.window_limit import OUTLOOK, window_with_margin
from .division import Division

SETTLE_S = 2.0
"""Longest time in seconds that a measurement waits for the reports of all workers."""
LATE_S = 10.0
"""Seconds for which a server may count less than the workers, because it is busy or they are."""
PROBED_WITHIN_S = 300.0
"""Seconds after which a probe without a result is given up: its worker is lost."""
_REPORTED_WITHIN_S = 1.0
"""Most seconds since the last report of each worker when a probe is sent."""
_UNSPENT = 0.01
"""Part of the limit that may be unspent when a probe is sent. The probe exceeds the limit by one more."""
_MOST_EXTRA = 64


class _Spending:
    """The spending of all workers as of their last reports, as `Discovery` asks for it."""

    def __init__(self, division: Division, limit: float) -> None:
        self.limit = limit
        self.window_s = 0.0
        self.extra = 0.0
        """What the requests of a probe take, beyond the limit."""
        self.disagrees = False
        """Whether the server counted clearly less at the last announcement."""
        self._division = division

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` fits. Workers report what leaves in parts of a window, so the time is too
        late by up to one of them; it is subtracted.
        """
        excess = amount + self.extra - self._division.unspent(now)
        if excess <= 0:
            return 0.0
        for until, spent in sorted(self._division.entries()):
            excess -= spent
            if excess <= 0:
                return max(1e-3, until - now - self.window_s / OUTLOOK)
        return self.window_s

    def since(self, moment: float) -> float:
        """Return what was spent after `moment`."""
        return self._division.spent_since(moment)

    def remove_oldest(self, down_to: float, now: float) -> bool:
        """Remove nothing, because the workers' ledgers hold what was spent. Note in `disagrees` whether the server
        counts clearly less.
        """
        self.disagrees = self.limit - self._division.left(now) > down_to + max(2.0, 0.1 * self.limit)
        return False

    def change_window(self, window_s: float, now: float) -> None:
        """Change the length of the window."""
        self.window_s = window_with_margin(window_s)


class Learner:
    """Learns the limit of `division`. Times are seconds of the keeper's clock.

    `told` is what the workers were told by an earlier keeper; infinity if nothing.
    """

    def __init__(self, division: Division, unit: str, told: float, window_s: float, now: float) -> None:
        self.workers: dict[str, float] = {}
        """The workers that do not declare the limit: when they last reported."""
        self._division = division
        window_s -= window_with_margin(0.0)
        self._spending = _Spending(division, told)
        self._spending.change_window(window_s, now)
        self._discovery = Discovery(self._spending, unit, window_s)
        self._throttled: tuple[float, float, float] | None = None
        self._measured = (0.0, -math.inf)
        """Since when the accepted requests were counted, and when others may be sent again."""
        self._probing: tuple[str, float, int] | None = None
        """The worker that probes, when it was asked to, and its requests beyond its share."""
        self._rejected_at = self._not_due_at = -math.inf
        self._disagrees_since = math.inf
        if told < math.inf:
            self._discovery.adopt(now)

    def tell(self, worker: str) -> Learned:
        """Return what was learned. The worker that is to probe is told so until it says how that ended."""
        prober, probe_id, extra = self._probing or ("", 0.0, 0)
        probe = (probe_id, extra) if prober == worker else (0.0, 0)
        return Learned(self._spending.limit, self._discovery.window_s, self._discovery.origin, *probe)

    @property
    def allows(self) -> tuple[float, float]:
        """The limit and the time for which workers count what they spend, in seconds; infinity: no limit."""
        return self._spending.limit, self._spending.window_s

    @property
    def settles_at(self) -> float:
        """When a measurement ends at the latest; infinity if there is none."""
        return math.inf if self._throttled is None else self._throttled[0] + SETTLE_S

    def hear(self, worker: str, heard: Heard, now: float) -> None:
        """Learn from a report. What the worker has spent was recorded before."""
        self.workers[worker] = now
        discovery = self._discovery
        if heard.accepted_s < math.inf and discovery.origin:
            discovery.ended(now, sent_at=now - heard.accepted_s, rejected=False, probe="")
        if heard.probed and self._probing is not None and self._probing[:2] == (worker, heard.probe_id):
            if heard.probed == "rejected":
                self._reject_probe(heard.room_in_s, now)
            else:
                self._probing = None
                if heard.probed == "unused":
                    discovery.abandon(now)
                else:
                    discovery.ended(now, sent_at=now - heard.probed_s, rejected=False, probe="probe")
        for sent_s, pause_s, silent_s in heard.throttled:
            discovery.ended(now, sent_at=now - sent_s, rejected=True, probe="")
            if self._probing is not None and now - sent_s >= self._probing[1]:
                self._reject_probe(pause_s, now)  # the probe has taken the place of this request
            elif now - sent_s <= discovery.learned_at:
                self._correct(now)
            elif self._throttled is None and now >= self._rejected_at + SETTLE_S:
                self._throttled = now, pause_s, now - silent_s
        if heard.announced is not None:
            limit, remaining, reset_s, in_flight = heard.announced
            self._spending.disagrees = False
            ours = in_flight * len(self.workers)
            discovery.announced(limit, remaining, reset_s, in_flight=ours, share=1, now=now)
            if self._spending.disagrees and now >= self._rejected_at + discovery.window_s:
                self._disagrees_since = min(self._disagrees_since, now)
                discovery.room_seen(now, late=now - self._disagrees_since < LATE_S)
            else:
                self._disagrees_since = math.inf

    def _reject_probe(self, room_in_s: float, now: float) -> None:
        self._probing, self._rejected_at = None, now
        self._discovery.ended(now, sent_at=now, rejected=True, probe="probe")
        self._discovery.throttled(now, sent_at=now, pause_s=room_in_s, since=now)

    def _correct(self, now: float) -> None:
        """Measure again, if requests that counted as accepted have been rejected since."""
        since, until = self._measured
        if now < until and self._discovery.origin == "throttled":
            self._spending.limit = min(self._spending.limit, max(1.0, math.floor(self._spending.since(since))))

    def leave(self, worker: str) -> None:
        """Forget a worker that left, or declares the limit from now on."""
        self.workers.pop(worker, None)

    def settle(self, workers: Collection[str], now: float) -> bool:
        """End a measurement that is due; return whether what was learned has changed since the last call."""
        if self._throttled is not None:
            began, pause_s, since = self._throttled
            if now >= began + SETTLE_S or all(self.workers.get(worker, -math.inf) > began for worker in workers):
                self._throttled = None
                self._measured = since - self._discovery.window_s, began + pause_s
                self._discovery.throttled(now, sent_at=now, pause_s=max(0.0, pause_s - (now - began)), since=since)
        return self._division.change(*self.allows, self.workers)

    def outdated(self, now: float) -> list[str]:
        """Return the workers that have to report before a probe that is due."""
        if not self._discovery.test_due(now):
            return []
        return [worker for worker, reported_at in self.workers.items() if now - reported_at > _REPORTED_WITHIN_S]

    def probe(self, listening: Container[str], now: float) -> str:
        """Return the worker that is to probe the limit from now on; "" if there is none."""
        discovery, division = self._discovery, self._division
        if self._probing is not None:
            worker, since, _ = self._probing
            if worker in self.workers and now - since < PROBED_WITHIN_S:
                return ""
            self._probing = None
            discovery.abandon(now)
        if not discovery.test_due(now):
            self._not_due_at = now
        if not discovery.test_due(now) or self.outdated(now):
            return ""
        worker = next((one for one in division.waiting() if one in listening and one in self.workers), "")
        each = division.unit(worker)
        unspent = max(0.0, division.unspent(now))
        steady = now > self._not_due_at + discovery.window_s  # requests leave the window all the time
        if unspent >= (max(each, _UNSPENT * self._spending.limit) if steady else each):
            discovery.reserved(each, now)  # there is room, as the source may have said
            return ""
        kind, extra = "", math.ceil(unspent / each)
        while worker and kind != "probe" and extra < _MOST_EXTRA:
            self._spending.extra = extra * each
            if discovery.wait_s(each, now) > 0:
                break
            kind, extra = discovery.reserved(each, now), extra + 1
        self._spending.extra = 0.0
        if kind != "probe":
            return ""
        self._probing = worker, now, extra
        return worker
