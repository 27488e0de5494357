"""The worker's side of shared limits: builds reports and applies the keeper's answers. Uses no clock or network itself.

Three rules keep the limits when messages are lost, late or out of order:
- A worker lowers a share first and reports it afterwards.
- A worker accepts only the answer to its latest report, and accepts it once.
- A share is valid for `ttl_s` after the worker *sent* the report that was last answered. Then it expires.

If the keeper is dead, no share is given to another worker: the next keeper counts every limit as spent for one window
and two times `ttl_s`, less what workers report to hold. So a worker keeps its shares until two times `ttl_s` after it
last knew of a live keeper, because the next keeper started later than that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import NamedTuple

from ..quotas.quota import Quota
from ..quotas.shared import Resource, SharedQuota
from .division import MIN_CHANGE
from .keeper import HOLD_S, MARGIN_S, TTL_S
from .messages import Answer, Grant, Part, Report, SourceNews, SourceReport

_log = logging.getLogger("qreward_plugins.sharing")

NETWORK_JITTER_S = 0.15
"""How much the network delays of two requests to a server may differ, in seconds."""

_WINDOWED: tuple[Resource, ...] = ("requests", "tokens")
_ROUNDING = 1e-6
_EARLY_S = 1e-6


class Demand(NamedTuple):
    """The calls of this process that wait for a source."""

    requests: int = 0
    tokens: float = 0.0
    """Estimated tokens of all of them."""
    largest: float = 0.0
    """Tokens of the next one."""


NOTHING = Demand()


class Member:
    """One worker that shares sources with others. Times are seconds of the caller's monotonic clock.

    `name` is unique to this worker. `quotas` maps the shared key of each source (`source_keys`) to its quota.
    """

    def __init__(self, name: str, quotas: Mapping[str, SharedQuota], *, ttl_s: float = TTL_S) -> None:
        self.name = name
        self.boot = ""
        """Identifies the keeper that answered last; empty if none has."""
        self._quotas = quotas
        self._ttl_s = ttl_s
        self._number = 0
        self._unanswered = -1
        self._accepted = 0
        self._unaccepted = 0  # reports since the last accepted answer
        self._sent_at = -math.inf
        self._known_at = -math.inf
        self._grants: dict[str, dict[Resource, Grant]] = {}
        self._debts: dict[str, list[tuple[float, float]]] = {}
        self._waits: dict[str, frozenset[Resource]] = {}
        self._wanted: dict[str, bool] = {}
        self._counted: dict[str, float] = {}  # concurrency that the keeper charges this worker with
        self._valid = False
        self._ended = False
        self.valid_until = -math.inf
        """When the shares expire."""
        self._keep_until(-math.inf)

    def report(self, now: float, demands: Mapping[str, Demand], news: Mapping[str, SourceNews]) -> Report:
        """Build the next report. Shares that it reports as lowered are lowered when this returns."""
        self._end_if_over(now)
        self._number += 1
        self._unanswered = self._number
        self._unaccepted += 1
        self._sent_at = now
        sources = {}
        for key, quota in self._quotas.items():
            demand = demands.get(key, NOTHING)
            self._wanted[key] = demand.requests > 0
            self._give_up(key, quota, demand, now)
            parts = {resource: self._part(key, quota, resource, demand, now) for resource in quota.limits()}
            self._waits[key] = frozenset(
                resource for resource in quota.share if parts[resource].more > _left(parts[resource])
            )
            if "concurrency" in parts:
                self._counted[key] = max(quota.share["concurrency"], quota.in_flight)
            for learned in quota.learning.values():
                if not demand.requests:
                    learned.give_back()
            sources[key] = SourceReport(quota.limits(), parts, news.get(key, SourceNews()), quota.heard(now))
        return Report(self.name, self._number, sources, accepted=self._accepted)

    def change(self, quotas: Mapping[str, SharedQuota]) -> None:
        """Share these quotas from now on. The next report tells the keeper which are gone."""
        self._quotas = quotas
        for kept in (self._grants, self._debts, self._waits, self._wanted, self._counted):
            for key in [key for key in kept if key not in quotas]:
                del kept[key]

    def begin(self, quota: Quota) -> None:
        """Give `quota` a share of nothing, until the keeper answers a report of it."""
        if isinstance(quota, SharedQuota):
            quota.resize({}, workers=quota.workers, now=-math.inf)
            quota.valid_until = self.valid_until

    def last_report(self, now: float) -> Report:
        """Give up all shares and build the last report of this worker."""
        self._lower_all(now)
        last = self.report(now, {}, {})
        self._unanswered = -1
        return last._replace(leaves=True)

    def accept(self, answer: Answer, now: float) -> bool:
        """Apply an answer; return False if it is late or not for the latest report, and is ignored."""
        if answer.number != self._unanswered or now >= self._sent_at + self._ttl_s:
            return False
        self._end_if_over(now)
        self._unanswered, self._unaccepted, self._accepted = -1, 0, answer.number
        self.boot = answer.boot
        self._known_at = self._sent_at
        self._keep_until(self._sent_at + self._ttl_s)
        for key, source_answer in answer.sources.items():
            quota = self._quotas.get(key)
            if quota is not None:
                if words := quota.learn(source_answer.learned, now):
                    _log.info("source %s: %s", quota.source, words)
                limits = quota.limits()
                self._grants[key] = dict(source_answer.grants)
                # The limit may have been lowered since the report.
                share = {
                    name: min(grant.share, limits[name][0])
                    for name, grant in source_answer.grants.items()
                    if name in limits
                }
                quota.resize(share, workers=source_answer.workers, now=now)
                tokens = source_answer.grants.get("tokens")
                if tokens is not None and tokens.left < math.inf:
                    quota.left_tokens = tokens.left
        return True

    def keeper_died(self, now: float, *, seen_at: float = -math.inf) -> None:
        """Note that the keeper is dead: the shares stay valid for up to `ttl_s` longer.

        `seen_at` is a time before the dead keeper was last looked up. The next keeper started after `seen_at`, and
        after the last report that was answered.
        """
        self._known_at = max(self._known_at, seen_at)
        if now < self.valid_until:
            until = min(now + self._ttl_s, self._known_at + 2 * self._ttl_s)
            self._keep_until(max(self.valid_until, until))

    def expire(self, now: float) -> bool:
        """Give up all shares if they have expired. Return True once for each expiry.

        After an expiry the caller sends no more requests, and cancels those that a limit counts only when they end.
        """
        self._end_if_over(now)
        ended, self._ended = self._ended, False
        return ended

    def report_due(self, key: str, demand: Demand, now: float) -> bool:
        """Return whether a report on a source is due at once. It is in four cases:

        - The keeper should know what was heard of a limit that it learns.
        - A call waits that the share does not allow, and the keeper does not know of it.
        - No call waits any more, and an unspent share is left for other workers.
        - Concurrency that was given up while in use is now free.
        """
        if self.must_await_answer(now):
            return False
        quota = self._quotas[key]
        if any(learned.urgent or (learned.extra and not demand.requests) for learned in quota.learning.values()):
            return True
        if key in self._counted and max(quota.share["concurrency"], quota.in_flight) < self._counted[key]:
            return True
        if not demand.requests:
            return self._wanted.get(key, False) and any(
                _left(self._part(key, quota, resource, demand, now)) >= max(1.0, MIN_CHANGE * share) - _ROUNDING
                for resource, share in quota.share.items()
            )
        known = self._waits.get(key, frozenset())
        for resource in quota.share:
            if resource not in known:
                part = self._part(key, quota, resource, demand, now)
                left = part.share - quota.drained(now) if resource == "burst" else _left(part)
                if left < part.unit - _ROUNDING and part.more > _left(part) + _ROUNDING:
                    return True
        return False

    def must_await_answer(self, now: float) -> bool:
        """Return whether no new report may replace the last one.

        A new report voids the answer to the last one. With a slow keeper, no answer would ever be accepted.
        """
        return self._unaccepted > 1 and now > self.valid_until - HOLD_S - MARGIN_S

    def _part(self, key: str, quota: SharedQuota, resource: Resource, demand: Demand, now: float) -> Part:
        share = quota.share.get(resource, 0.0)
        if resource == "burst":
            more = min(quota.limits()["burst"][0], quota.drained(now) + demand.requests) if demand.requests else 0.0
            return Part(share, self._owed(key, quota, now), more)
        spent = quota.spent(resource, now)
        if resource == "tokens":
            return Part(share, spent, demand.tokens, max(demand.largest, 1.0))
        return Part(share, spent, float(demand.requests))

    def _give_up(self, key: str, quota: SharedQuota, demand: Demand, now: float) -> None:
        """Lower shares that other workers need.

        A recalled share, or a window's share that is used up, falls to the fair share. A share that other workers wait
        for falls to zero if no call waits here; what was spent of it stays counted.
        """
        grants, share = self._grants.get(key, {}), dict(quota.share)
        for resource, grant in grants.items():
            if share.get(resource, 0.0) > grant.target:
                part = self._part(key, quota, resource, demand, now)
                # A window's share that is used up is no use here; others get it as the window moves on.
                if grant.recall or (resource in _WINDOWED and _left(part) < part.unit - _ROUNDING):
                    share[resource] = grant.target
            if (grant.scarce or grant.recall) and not demand.requests and resource in share:
                share[resource] = 0.0
            grants[resource] = grant._replace(recall=False)
        if share != quota.share:
            self._lower(key, quota, share, now)

    def _lower(self, key: str, quota: SharedQuota, share: Mapping[Resource, float], now: float) -> None:
        held = quota.share.get("burst", 0.0)
        if share.get("burst", 0.0) < held:
            # The next holder may assume a full bucket, so the amount stays charged until the bucket is full.
            until = now + quota.refilled_in_s(now) + NETWORK_JITTER_S
            debts = [debt for debt in self._debts.get(key, ()) if debt[0] > until or debt[1] > held]
            self._debts[key] = sorted([*debts, (until, held)], reverse=True)
        quota.resize(share, workers=quota.workers, now=now)

    def _lower_all(self, now: float) -> None:
        for key, quota in self._quotas.items():
            self._lower(key, quota, {}, now)

    def _owed(self, key: str, quota: SharedQuota, now: float) -> tuple[tuple[float, float], ...]:
        """Return the parts of a bucket that are not full again yet: (seconds until full, amount). The seconds are
        infinity while a request is held that was reserved under the share.
        """
        full_at = now + quota.refilled_in_s(now) + NETWORK_JITTER_S
        debts = [(full_at if until == math.inf else until, held) for until, held in self._debts.get(key, ())]
        debts = self._debts[key] = sorted([debt for debt in debts if debt[0] > now], reverse=True)
        owed, above = [], 0.0
        for until, held in debts:
            if held > above:
                owed.append((until - now, held - above))
                above = held
        return tuple(owed)

    def _end_if_over(self, now: float) -> None:
        # Event loops run timers a little early.
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
