"""Plain ways to choose among the sources that can send a job now, for who wants one by name.

They are what load balancers offer. None of them knows how long anything takes, which is why the default is the earliest
expected finish (`planner.py`); but a share that can be predicted is sometimes worth more than speed. All of them choose
among the sources that may send now, so none of them lets a job wait for a source while another one is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..config.models import Strategy
from .upstream import Upstream

Choice = Callable[[Sequence[Upstream]], Upstream]


class RoundRobin:
    """Each source in turn, as often as its weight says: smooth weighted round robin, so that no source gets its share
    in one lump.

    The rule is that of nginx (`ngx_http_upstream_round_robin.c`): every candidate gains its weight, the richest one is
    chosen and pays for all.
    """

    def __init__(self, *, weighted: bool) -> None:
        self._weighted = weighted
        self._credit: dict[str, float] = {}

    def __call__(self, candidates: Sequence[Upstream]) -> Upstream:
        total = 0.0
        for upstream in candidates:
            weight = upstream.weight if self._weighted else 1.0
            total += weight
            self._credit[upstream.name] = self._credit.get(upstream.name, 0.0) + weight
        chosen = max(candidates, key=lambda upstream: self._credit[upstream.name])
        self._credit[chosen.name] -= total
        return chosen


def least_requests(candidates: Sequence[Upstream]) -> Upstream:
    """The source with the fewest requests in flight for its weight."""
    return min(candidates, key=lambda upstream: upstream.quota.in_flight / upstream.weight)


def least_tokens(candidates: Sequence[Upstream]) -> Upstream:
    """The source with the fewest tokens in flight for its weight."""
    return min(
        candidates,
        key=lambda upstream: sum(upstream.tokens(attempt.request) for attempt in upstream.live) / upstream.weight,
    )


def strategy(name: Strategy) -> Choice | None:
    """The strategy of this name; None: earliest finish, which the planner itself is."""
    if name == "round_robin":
        return RoundRobin(weighted=False)
    if name == "weighted":
        return RoundRobin(weighted=True)
    return {"least_requests": least_requests, "least_tokens": least_tokens}.get(name)
