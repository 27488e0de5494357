"""The worker's side of shared limits: builds reports and applies the keeper's answers. Uses no clock or network itself.

Three rules keep the limits when messages are lost, late or out of order:
- A worker lowers a share first and reports it afterwards.
- A worker accepts only the answer to its latest report, and accepts it once.
- A share is valid for `TTL_S` after the worker *sent* the report that was last answered. Then it expires.

If the keeper is dead, no share is given to another worker: the next keeper counts every limit as spent for one window
and `TTL_S`, less what workers report to hold.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..quotas.shared import Resource, SharedQuota
from .keeper import HOLD_S, LONGEST_NEWS_S, MARGIN_S, TTL_S
from .messages import Answer, Grant, Part, Report, SourceAnswer, SourceNews, SourceReport

if TYPE_CHECKING:
    from ..quotas.pauses import Breaker, Pauses
    from ..quotas.quota import Quota

_log = logging.getLogger("qreward_plugins.sharing")

NETWORK_JITTER_S = 0.15
"""How much the network delays of two requests to a server may differ, in seconds."""

_WINDOWED: tuple[Resource, ...] = ("requests", "tokens")
_ROUNDING = 1e-6
_ROUNDING_S = 1e-6
_EARLY_S = 1e-6
_NEVER = (-math.inf, -math.inf)


class Limited(Protocol):
    """What has limits that are shared: an `Upstream` of the scheduler, or a key of an accelerated function."""

    @property
    def quota(self) -> Quota: ...
    @property
    def breaker(self) -> Breaker: ...
    @property
    def pauses(self) -> Pauses: ...
    @property
    def live(self) -> Mapping[Any, None]:
        """Its attempts under way."""
        ...


class Demand(NamedTuple):
    """The calls of this process that wait for a source."""

    requests: int = 0
    tokens: float = 0.0
    """Estimated tokens of all of them."""
    largest: float = 0.0
    """Tokens of the next one."""


NOTHING = Demand()


class MemberSource:
    """One source that this worker shares: its shares of the limits, and what it knows of the source. Pairs of times are
    when the pause ends, and until when other processes are told that the circuit is open.
    """

    def __init__(self, limited: Limited) -> None:
        self.limited = limited
        self.drains = False
        """Whether it was removed, and only its attempts under way are left."""
        self._grants: dict[Resource, Grant] = {}
        self._debts: list[tuple[float, float]] = []
        self._waits: frozenset[Resource] = frozenset()
        self._wanted = False
        """Whether calls waited for it at the last report."""
        self._counted = 0.0
        """Concurrency that the keeper charges this worker with."""
        self._from_others: tuple[float, ...] = _NEVER
        """Times that came from other processes. They are not relayed, to avoid an echo."""
        self._reported: tuple[float, ...] = _NEVER
        """Times that the last report contained."""
        self._was_open = False
        """Whether the circuit was open at the last report."""
        self._recovered = False
        """Whether the circuit closed again and the keeper has not confirmed a report of it."""
        self._tested_s = 0.0
        """Seconds for which others waited for this process to test the source, at the last report."""

    @property
    def quota(self) -> SharedQuota:
        """Its quota."""
        assert isinstance(self.limited.quota, SharedQuota)
        return self.limited.quota

    def report(self, demand: Demand, now: float) -> SourceReport:
        """Build the next report. Shares that it reports as lowered are lowered when this returns."""
        quota = self.quota
        self._wanted = demand.requests > 0
        self._give_up(demand, now)
        parts = {resource: self._part(resource, demand, now) for resource in quota.limits()}
        self._waits = frozenset(resource for resource in quota.share if parts[resource].more > _left(parts[resource]))
        self._counted = self._concurrency()
        for learned in quota.learning.values():
            if not demand.requests:
                learned.give_back()
        return SourceReport(quota.limits(), parts, self._news(demand, now), quota.heard(now))

    def accept(self, answer: SourceAnswer, now: float) -> None:
        """Apply an answer."""
        quota = self.quota
        if words := quota.learn(answer.learned, now):
            _log.info("source %s: %s", quota.source, words)
        limits = quota.limits()
        self._grants = dict(answer.grants)
        # The limit may have been lowered since the report.
        share = {name: min(grant.share, limits[name][0]) for name, grant in answer.grants.items() if name in limits}
        quota.resize(share, workers=answer.workers, now=now)
        tokens = answer.grants.get("tokens")
        if tokens is not None and tokens.left < math.inf:
            quota.left_tokens = tokens.left
        before = self._ends(now)
        self._learn(answer.news, now)
        times = zip(before, self._ends(now), self._from_others, strict=True)
        self._from_others = tuple(new if new > old else earlier for old, new, earlier in times)
        self._recovered = False

    def report_due(self, demand: Demand, now: float) -> bool:
        """Return whether a report is due at once. It is in five cases:

        - The source asked for a pause, its circuit opened or closed, or this process tests it.
        - The keeper should know what was heard of a limit that it learns.
        - A call waits that the share does not allow, and the keeper does not know of it.
        - No call waits any more, so that the share is free for other workers.
        - Concurrency that was given up while in use is now free.
        """
        quota, tested_s = self.quota, self._tests_s(demand, now)
        if (self._was_open and self.limited.breaker.closed) or (self._wanted and not demand.requests):
            return True
        if tested_s > self._tested_s + _ROUNDING_S or tested_s <= 0 < self._tested_s:
            return True
        own = zip(self._own(now), self._reported, strict=True)
        if any(end > reported + _ROUNDING_S for end, reported in own):
            return True
        if any(learned.urgent or (learned.extra and not demand.requests) for learned in quota.learning.values()):
            return True
        if self._concurrency() < self._counted:
            return True
        for resource in quota.share if demand.requests else ():
            if resource not in self._waits and self._lacks(resource, demand, now):
                return True
        return False

    def _lacks(self, resource: Resource, demand: Demand, now: float) -> bool:
        """Whether the calls that wait need more of a limit than this worker's share has left."""
        quota = self.quota
        if resource == "burst":
            part = self._part(resource, demand, now)
            left, unspent, unit, more = part.share - quota.drained(now), _left(part), part.unit, part.more
        else:
            # It is asked after each step of the scheduler, so it looks at no single entry of the window.
            left = unspent = quota.share[resource] - quota.used(resource, now)
            tokens = resource == "tokens"
            unit, more = (max(demand.largest, 1.0), demand.tokens) if tokens else (1.0, float(demand.requests))
        return left < unit - _ROUNDING and more > unspent + _ROUNDING

    # Shares

    def _concurrency(self) -> float:
        share = self.quota.share.get("concurrency")
        return 0.0 if share is None else max(share, self.quota.in_flight)

    def _part(self, resource: Resource, demand: Demand, now: float) -> Part:
        quota = self.quota
        share = quota.share.get(resource, 0.0)
        if resource == "burst":
            more = min(quota.limits()["burst"][0], quota.drained(now) + demand.requests) if demand.requests else 0.0
            return Part(share, self._owed(now), more)
        spent = quota.spent(resource, now)
        if resource == "tokens":
            return Part(share, spent, demand.tokens, max(demand.largest, 1.0))
        return Part(share, spent, float(demand.requests))

    def _give_up(self, demand: Demand, now: float) -> None:
        """Lower shares that other workers need.

        A recalled share, or a window's share that is used up, falls to the fair share. A share that other workers wait
        for falls to zero if no call waits here; what was spent of it stays counted.
        """
        share = dict(self.quota.share)
        for resource, grant in self._grants.items():
            if share.get(resource, 0.0) > grant.target:
                part = self._part(resource, demand, now)
                # A window's share that is used up is no use here; others get it as the window moves on.
                if grant.recall or (resource in _WINDOWED and _left(part) < part.unit - _ROUNDING):
                    share[resource] = grant.target
            if (grant.scarce or grant.recall) and not demand.requests and resource in share:
                share[resource] = 0.0
            self._grants[resource] = grant._replace(recall=False)
        if share != self.quota.share:
            self.lower(share, now)

    def lower(self, share: Mapping[Resource, float], now: float) -> None:
        """Lower the shares to `share`, and give up those that are not in it."""
        quota = self.quota
        held = quota.share.get("burst", 0.0)
        if share.get("burst", 0.0) < held:
            # The next holder may assume a full bucket, so the amount stays charged until the bucket is full.
            until = now + quota.refilled_in_s(now) + NETWORK_JITTER_S
            debts = [debt for debt in self._debts if debt[0] > until or debt[1] > held]
            self._debts = sorted([*debts, (until, held)], reverse=True)
        quota.resize(share, workers=quota.workers, now=now)

    def _owed(self, now: float) -> tuple[tuple[float, float], ...]:
        """Return the parts of a bucket that are not full again yet: (seconds until full, amount). The seconds are
        infinity while a request is held that was reserved under the share.
        """
        full_at = now + self.quota.refilled_in_s(now) + NETWORK_JITTER_S
        debts = [(full_at if until == math.inf else until, held) for until, held in self._debts]
        self._debts = sorted([debt for debt in debts if debt[0] > now], reverse=True)
        owed, above = [], 0.0
        for until, held in self._debts:
            if held > above:
                owed.append((until - now, held - above))
                above = held
        return tuple(owed)

    # News

    def _ends(self, now: float) -> tuple[float, float]:
        return now + self.limited.pauses.left_s(now), self.limited.breaker.failed_at + LONGEST_NEWS_S

    def _own(self, now: float) -> tuple[float, ...]:
        """Return the times that this process observed itself; minus infinity if none."""
        ends = zip(self._ends(now), self._from_others, strict=True)
        return tuple(end if end > max(now, known) + _ROUNDING_S else -math.inf for end, known in ends)

    def _tests_s(self, demand: Demand, now: float) -> float:
        """Return for how many seconds this process tests the source; 0 if it has nothing to ask."""
        return self.limited.pauses.tested_s(now) if demand.requests > 0 or self.limited.live else 0.0

    def _news(self, demand: Demand, now: float) -> SourceNews:
        self._reported = self._own(now)
        pause_s, open_s = (max(0.0, end - now) for end in self._reported)
        self._recovered = self._recovered or (self._was_open and self.limited.breaker.closed)
        self._was_open = not self.limited.breaker.closed
        self._tested_s = self._tests_s(demand, now)
        return SourceNews(pause_s, open_s, self._recovered, self._tested_s)

    def _learn(self, news: SourceNews, now: float) -> None:
        """Take in what other processes have learned."""
        limited = self.limited
        if news.pause_s > 0:
            limited.pauses.paused_elsewhere(news.pause_s, now)
        limited.pauses.tested_elsewhere(news.tested_s, now)
        if news.open_s > 0:
            limited.breaker.opened_elsewhere()


class Member:
    """One worker that shares sources with others. Times are seconds of the caller's monotonic clock.

    `name` is unique to this worker. `sources` are what has limits, by shared key (`source_keys`).
    """

    def __init__(self, name: str, sources: Mapping[str, Limited]) -> None:
        self.name = name
        self.sources: dict[str, MemberSource] = {}
        self.valid_until = -math.inf
        """When the shares expire; minus infinity if there are none."""
        self._number = 0
        self._unanswered = -1
        self.accepted = 0
        """Number of the last report whose answer was accepted; 0 if none."""
        self._sent_at = -math.inf
        self._ended = False
        self.change(sources)

    def change(self, sources: Mapping[str, Limited]) -> None:
        """Share these sources from now on. The next report tells the keeper which are gone.

        A quota that is new has a share of nothing, until the keeper answers a report of it.
        """
        before, self.sources = self.sources, {}
        for key, limited in sources.items():
            source = before.get(key)
            begins = source is None or source.quota is not limited.quota
            source = self.sources[key] = source or MemberSource(limited)
            source.limited = limited
            if begins:
                source.quota.resize({}, workers=source.quota.workers, now=-math.inf)
                source.quota.valid_until = self.valid_until

    def report(self, now: float, demands: Mapping[str, Demand]) -> Report:
        """Build the next report. Shares that it reports as lowered are lowered when this returns."""
        self._end_if_over(now)
        self._number += 1
        self._unanswered = self._number
        self._sent_at = now
        sources = {key: source.report(demands.get(key, NOTHING), now) for key, source in self.sources.items()}
        return Report(self.name, self._number, sources, accepted=self.accepted)

    def last_report(self, now: float) -> Report:
        """Give up all shares and build the last report of this worker."""
        self._lower_all(now)
        last = self.report(now, {})
        self._unanswered = -1
        sources = {key: source._replace(news=SourceNews()) for key, source in last.sources.items()}
        return last._replace(sources=sources, leaves=True)

    def accept(self, answer: Answer, now: float) -> bool:
        """Apply an answer; return False if it is late or not for the latest report, and is ignored."""
        if answer.number != self._unanswered or now >= self._sent_at + TTL_S:
            return False
        self._end_if_over(now)
        self._unanswered, self.accepted = -1, answer.number
        self.valid_until = self._sent_at + TTL_S
        for source in self.sources.values():
            source.quota.valid_until = self.valid_until
        for key, source_answer in answer.sources.items():
            if key in self.sources:
                self.sources[key].accept(source_answer, now)
        return True

    def expire(self, now: float) -> bool:
        """Give up all shares if they have expired. Return True once for each expiry.

        After an expiry the caller sends no more requests, and cancels those that a limit counts only when they end.
        """
        self._end_if_over(now)
        ended, self._ended = self._ended, False
        return ended

    def must_await_answer(self, now: float) -> bool:
        """Return whether no new report may replace the last one.

        A new report voids the answer to the last one. With a slow keeper, no answer would ever be accepted.
        """
        return self._number - self.accepted > 1 and now > self.valid_until - HOLD_S - MARGIN_S

    def _lower_all(self, now: float) -> None:
        for source in self.sources.values():
            source.lower({}, now)

    def _end_if_over(self, now: float) -> None:
        # Event loops run timers a little early.
        if -math.inf < self.valid_until <= now + _EARLY_S:
            self.valid_until, self._ended = -math.inf, True
            self._lower_all(now)


def _left(part: Part) -> float:
    return part.share - math.fsum(amount for _, amount in part.spent)
