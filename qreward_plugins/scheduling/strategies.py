"""The named strategies: they choose among the sources that can send a job now, as load balancers do.

None of them considers latency, so the default is the earliest expected finish (`planner.py`). They are for runs that
need predictable shares more than speed. They choose among the sources that can send now, so no job waits for a source
while another one is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..config import Strategy
from .upstream import Upstream

Choice = Callable[[Sequence[Upstream]], Upstream]


class RoundRobin:
    """Smooth weighted round robin: each source in turn, as often as its weight says, and evenly spread.

    The rule of nginx (`ngx_http_upstream_round_robin.c`): every candidate gains its weight. The one with the most
    credit is chosen, and loses the sum of all weights.
    """

    def __init__(self, weight: Callable[[Upstream], float]) -> None:
        self._weight = weight
        self._credit: dict[str, float] = {}

    def __call__(self, candidates: Sequence[Upstream]) -> Upstream:
        total = 0.0
        for upstream in candidates:
            weight = self._weight(upstream)
            total += weight
            self._credit[upstream.name] = self._credit.get(upstream.name, 0.0) + weight
        chosen = max(candidates, key=lambda upstream: self._credit[upstream.name])
        self._credit[chosen.name] -= total
        return chosen


def strategy(name: Strategy) -> Choice | None:
    """The strategy of this name; None for earliest finish, which the planner implements.

    `least_requests` and `least_tokens` choose the source with the fewest requests or tokens in flight for its weight.
    """
    if name == "round_robin":
        return RoundRobin(lambda upstream: 1.0)
    if name == "weighted":
        return RoundRobin(lambda upstream: upstream.weight)
    if name == "least_requests":
        return lambda candidates: min(candidates, key=lambda upstream: upstream.quota.in_flight / upstream.weight)
    if name == "least_tokens":
        return lambda candidates: min(candidates, key=lambda upstream: _tokens_in_flight(upstream) / upstream.weight)
    return None


def _tokens_in_flight(upstream: Upstream) -> float:
    return sum(upstream.tokens(attempt.request) for attempt in upstream.live)
