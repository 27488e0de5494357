"""A worker's side of the shares: what it tells the keeper, and what it does with the answers, without clock or network.

Three rules keep the limits, whatever is lost, late or out of order. A share is lowered first and then reported. Of the
answers only the one to the latest report counts. And a share is valid for `ttl_s` from when the report was *sent* that
was answered last; then it ends by itself, unless it is certain that there is no keeper who could have given it away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..quotas import Resource, SharedQuota
from .keeper import TTL_S
from .messages import Answer, Grant, Part, Report, SourceNews, SourceReport

WAY_S = 0.15
"""How much the ways of two requests to a server may differ, in seconds."""

_ROUNDING = 1e-6


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
        self._sent_at = -math.inf
        self._grants: dict[str, Mapping[Resource, Grant]] = {}
        self._debts: dict[str, tuple[float, float]] = {}
        self._waits: dict[str, frozenset[Resource]] = {}
        self.valid_until = -math.inf
        """When the shares end by themselves."""
        self._keep_until(-math.inf)

    def report(self, now: float, demands: Mapping[str, Demand], news: Mapping[str, SourceNews]) -> Report:
        """The next report. What it says is given up has been given up when this returns."""
        self.expire(now)
        self._number += 1
        self._sent_at = now
        said = {}
        for key, quota in self._quotas.items():
            demand = demands.get(key, NOTHING)
            self._give_up(key, quota, demand, now)
            parts = {resource: self._part(key, quota, resource, demand, now) for resource in quota.limits()}
            self._waits[key] = frozenset(resource for resource, part in parts.items() if part.more > _left(part))
            said[key] = SourceReport(quota.limits(), parts, news.get(key, SourceNews()))
        return Report(self.name, self._number, said)

    def farewell(self, now: float) -> Report:
        """The last report: nothing is sent any more."""
        for quota in self._quotas.values():
            quota.resize({}, workers=quota.workers, now=now)
        last = self.report(now, {}, {})
        return last._replace(leaves=True)

    def accept(self, answer: Answer, now: float) -> bool:
        """Take in an answer; return whether it counts."""
        if answer.number != self._number or now >= self._sent_at + self._ttl_s:
            return False
        self.boot = answer.boot
        self._keep_until(self._sent_at + self._ttl_s)
        for key, said in answer.sources.items():
            quota = self._quotas.get(key)
            if quota is not None:
                self._grants[key] = said.grants
                share = {resource: grant.share for resource, grant in said.grants.items()}
                quota.resize(share, workers=said.workers, now=now)
        return True

    def absent(self, now: float) -> None:
        """Note that there is certainly no keeper now: what was given stays given, for as long again."""
        if now < self.valid_until:
            self._keep_until(max(self.valid_until, now + self._ttl_s))

    def expire(self, now: float) -> bool:
        """Give up everything when its time is over; return whether there was anything."""
        if now < self.valid_until:
            return False
        held = False
        for quota in self._quotas.values():
            if any(quota.share.values()):
                held = True
                quota.resize({}, workers=quota.workers, now=now)
        return held

    def short(self, key: str, demand: Demand, now: float) -> bool:
        """Whether something waits for a source that its share does not let go, and the keeper does not know it yet."""
        quota = self._quotas[key]
        if not demand.requests:
            return False
        for resource in quota.limits():
            if resource not in self._waits.get(key, ()):
                part = self._part(key, quota, resource, demand, now)
                if _left(part) < part.unit - _ROUNDING:
                    return True
        return False

    def _part(self, key: str, quota: SharedQuota, resource: Resource, demand: Demand, now: float) -> Part:
        share, spent = quota.share[resource], quota.spent(resource, now)
        if resource == "tokens":
            return Part(share, spent, demand.tokens, max(demand.largest, 1.0))
        if resource == "burst":
            until, amount = self._debts.get(key, (-math.inf, 0.0))
            whole, _ = quota.limits()["burst"]
            debt = ((until - now, amount),) if until > now else ()
            return Part(share, debt, whole if demand.requests else 0.0)
        return Part(share, spent, float(demand.requests))

    def _give_up(self, key: str, quota: SharedQuota, demand: Demand, now: float) -> None:
        """Lower to what is fair what is spent, or what others wait for."""
        share = dict(quota.share)
        for resource, grant in self._grants.get(key, {}).items():
            held = share.get(resource, 0.0)
            if held <= grant.target:
                continue
            part = self._part(key, quota, resource, demand, now)
            if resource == "burst" and grant.recall:
                # Whoever gets it must find the bucket as it is.
                self._debts[key] = (now + quota.refilled_in_s(now) + WAY_S, held)
            if grant.recall or (resource != "burst" and _left(part) < part.unit - _ROUNDING):
                share[resource] = grant.target
        self._grants[key] = {
            resource: grant._replace(recall=False) for resource, grant in self._grants.get(key, {}).items()
        }
        if share != quota.share:
            quota.resize(share, workers=quota.workers, now=now)

    def _keep_until(self, until: float) -> None:
        self.valid_until = until
        for quota in self._quotas.values():
            quota.valid_until = until


def _left(part: Part) -> float:
    return part.share - math.fsum(amount for _, amount in part.spent)
