"""A worker's side of the shares: what it tells the keeper, and what it does with the answers, without clock or network.

Three rules keep the limits, whatever is lost, late or out of order. A share is lowered first and then reported. Of the
answers only the one to the latest report counts, and that once. And a share is valid for `ttl_s` from when the report
was *sent* that was answered last; then it ends by itself.

Where the keeper is certainly dead, nobody gives away what this worker has: its heir takes all of every limit as spent
for a window and two times `ttl_s`, less what workers say they hold. So a worker may keep its shares until two times
`ttl_s` after it last knew that there was a keeper: the heir was started later than that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..quotas import Resource, SharedQuota
from .keeper import HOLD_S, MARGIN_S, TTL_S
from .messages import Answer, Grant, Part, Report, SourceNews, SourceReport
from .pool import WORTH_A_WORD

WAY_S = 0.15
"""How much the ways of two requests to a server may differ, in seconds."""

_AGE = ("requests", "tokens")
_ROUNDING = 1e-6
_EARLY_S = 1e-6


class Demand(NamedTuple):
    """What waits for a source in this process."""

    requests: int = 0
    tokens: float = 0.0
    """Tokens of all of them, estimated."""
    largest: float = 0.0
    """Tokens of the one that goes next."""


NOTHING = Demand()


class Member:
    """One worker among those that share sources. Times are seconds of one monotonic clock, its own.

    `name` is this worker's alone. `quotas` are the sources' quotas by the keys that all workers know them by.
    """

    def __init__(self, name: str, quotas: Mapping[str, SharedQuota], *, ttl_s: float = TTL_S) -> None:
        self.name = name
        self.boot = ""
        """The keeper that answered last; empty: none has."""
        self._quotas = quotas
        self._ttl_s = ttl_s
        self._number = 0
        self._unanswered = -1
        self._heeded = 0
        self._unheeded = 0  # reports since the last answer that counted
        self._sent_at = -math.inf
        self._known_at = -math.inf
        self._grants: dict[str, dict[Resource, Grant]] = {}
        self._debts: dict[str, list[tuple[float, float]]] = {}
        self._waits: dict[str, frozenset[Resource]] = {}
        self._wanted: dict[str, bool] = {}
        self._counted: dict[str, float] = {}  # requests in flight that the keeper counts
        self._valid = False
        self._ended = False
        self.valid_until = -math.inf
        """When the shares end by themselves."""
        self._keep_until(-math.inf)

    def report(self, now: float, demands: Mapping[str, Demand], news: Mapping[str, SourceNews]) -> Report:
        """The next report. What it says is given up has been given up when this returns."""
        self._end_if_over(now)
        self._number += 1
        self._unanswered = self._number
        self._unheeded += 1
        self._sent_at = now
        said = {}
        for key, quota in self._quotas.items():
            demand = demands.get(key, NOTHING)
            self._wanted[key] = demand.requests > 0
            self._give_up(key, quota, demand, now)
            parts = {resource: self._part(key, quota, resource, demand, now) for resource in quota.limits()}
            self._waits[key] = frozenset(resource for resource, part in parts.items() if part.more > _left(part))
            if "concurrency" in parts:
                self._counted[key] = max(quota.share["concurrency"], quota.in_flight)
            said[key] = SourceReport(quota.limits(), parts, news.get(key, SourceNews()))
        return Report(self.name, self._number, said, heeded=self._heeded)

    def farewell(self, now: float) -> Report:
        """The last report: nothing is sent any more."""
        self._lower_all(now)
        last = self.report(now, {}, {})
        self._unanswered = -1
        return last._replace(leaves=True)

    def accept(self, answer: Answer, now: float) -> bool:
        """Take in an answer; return whether it counts."""
        if answer.number != self._unanswered or now >= self._sent_at + self._ttl_s:
            return False
        self._end_if_over(now)
        self._unanswered, self._unheeded, self._heeded = -1, 0, answer.number
        self.boot = answer.boot
        self._known_at = self._sent_at
        self._keep_until(self._sent_at + self._ttl_s)
        for key, said in answer.sources.items():
            quota = self._quotas.get(key)
            if quota is not None:
                limits = quota.limits()
                self._grants[key] = dict(said.grants)
                # It may have been told of a lower limit since it asked.
                share = {
                    name: min(grant.share, limits[name][0]) for name, grant in said.grants.items() if name in limits
                }
                quota.resize(share, workers=said.workers, now=now)
        return True

    def absent(self, now: float, *, seen_at: float = -math.inf) -> None:
        """Note that the keeper is certainly dead: what was given stays given for as long again, at most.

        `seen_at` is when the keeper that is dead was last looked up, before it was found there: whoever comes next was
        started after that, as it was after the last report that was answered.
        """
        self._known_at = max(self._known_at, seen_at)
        if now < self.valid_until:
            until = min(now + self._ttl_s, self._known_at + 2 * self._ttl_s)
            self._keep_until(max(self.valid_until, until))

    def expire(self, now: float) -> bool:
        """Give up everything when its time is over; returns once whether that was since this was asked last: then
        nothing may be sent that was not, and nothing may go on that counts when it ends.
        """
        self._end_if_over(now)
        ended, self._ended = self._ended, False
        return ended

    def short(self, key: str, demand: Demand, now: float) -> bool:
        """Whether the keeper should hear of a source at once: something waits that its share does not let go, and the
        keeper does not know it yet; nothing waits any more, and it has some left that others may wait for; or requests
        in flight that were given up have ended.
        """
        if self.patient(now):
            return False
        quota = self._quotas[key]
        if key in self._counted and max(quota.share["concurrency"], quota.in_flight) < self._counted[key]:
            return True
        if not demand.requests:
            return self._wanted.get(key, False) and any(
                _left(self._part(key, quota, resource, demand, now)) >= max(1.0, WORTH_A_WORD * share) - _ROUNDING
                for resource, share in quota.share.items()
            )
        known = self._waits.get(key, frozenset())
        for resource in quota.limits():
            if resource not in known:
                part = self._part(key, quota, resource, demand, now)
                left = part.share - quota.drained(now) if resource == "burst" else _left(part)
                if left < part.unit - _ROUNDING and part.more > _left(part) + _ROUNDING:
                    return True
        return False

    def patient(self, now: float) -> bool:
        """Whether the last report had better be left to be answered: a newer one makes its answer void, and with a slow
        keeper none would ever count.
        """
        return self._unheeded > 1 and now > self.valid_until - HOLD_S - MARGIN_S

    def _part(self, key: str, quota: SharedQuota, resource: Resource, demand: Demand, now: float) -> Part:
        share = quota.share[resource]
        if resource == "burst":
            more = min(quota.limits()["burst"][0], quota.drained(now) + demand.requests) if demand.requests else 0.0
            return Part(share, self._owed(key, now), more)
        spent = quota.spent(resource, now)
        if resource == "tokens":
            return Part(share, spent, demand.tokens, max(demand.largest, 1.0))
        return Part(share, spent, float(demand.requests))

    def _give_up(self, key: str, quota: SharedQuota, demand: Demand, now: float) -> None:
        """Lower to what is fair what is spent, or what others wait for; and to nothing what is of no use here and
        others wait for: what was spent of it counts without that.
        """
        grants, share = self._grants.get(key, {}), dict(quota.share)
        for resource, grant in grants.items():
            if share.get(resource, 0.0) > grant.target:
                part = self._part(key, quota, resource, demand, now)
                # What ages is of no more use to it when it is spent, and others get it as it ages.
                if grant.recall or (resource in _AGE and _left(part) < part.unit - _ROUNDING):
                    share[resource] = grant.target
            if (grant.scarce or grant.recall) and not demand.requests and resource in share:
                share[resource] = 0.0
            grants[resource] = grant._replace(recall=False)
        if share != quota.share:
            self._lower(key, quota, share, now)

    def _lower(self, key: str, quota: SharedQuota, share: Mapping[Resource, float], now: float) -> None:
        held = quota.share.get("burst", 0.0)
        if share.get("burst", 0.0) < held:
            # Whoever gets it must find the bucket full, as this worker found it.
            until = now + quota.refilled_in_s(now) + WAY_S
            debts = [debt for debt in self._debts.get(key, ()) if debt[0] > until or debt[1] > held]
            self._debts[key] = sorted([*debts, (until, held)], reverse=True)
        quota.resize(share, workers=quota.workers, now=now)

    def _lower_all(self, now: float) -> None:
        for key, quota in self._quotas.items():
            self._lower(key, quota, {}, now)

    def _owed(self, key: str, now: float) -> tuple[tuple[float, float], ...]:
        """How much of a bucket nobody else may have yet, because it is not full again: (seconds until then, amount)."""
        debts = self._debts[key] = [debt for debt in self._debts.get(key, ()) if debt[0] > now]
        owed, above = [], 0.0
        for until, held in debts:
            if held > above:
                owed.append((until - now, held - above))
                above = held
        return tuple(owed)

    def _end_if_over(self, now: float) -> None:
        # Timers may run a little early.
        if self._valid and now >= self.valid_until - _EARLY_S:
            self._valid, self._ended = False, True
            self._lower_all(now)

    def _keep_until(self, until: float) -> None:
        self.valid_until = until
        self._valid = until > -math.inf
        for quota in self._quotas.values():
            quota.valid_until = until


def _left(part: Part) -> float:
    return part.share - math.fsum(amount for _, amount in part.spent)
