"""The strategies by which a request is routed to one of the replicas of a source.

A strategy narrows the replicas down. If one is left, that one is chosen; if several are equal, or the strategy does not
know enough, the next strategy goes on with them. In the end, the one that was used least recently is chosen.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ..config.source_models import Routing, RoutingStrategy
from .prefixes import Prefix
from .replica import Replica

STALE_S = 5.0
"""Seconds after which a reading of a KV cache does not count any more."""
CHOICES = 2
"""The replicas among which a new prefix chooses before others. They are the same in all processes."""
SLACK = 3
"""How many requests more than the least loaded of all replicas one of these may have. A process sees only its own."""
UNSPREAD = 8
"""Requests with one prefix that are not spread, however low the load is."""

_64 = (1 << 64) - 1


def chosen(
    replicas: Sequence[Replica], routing: Routing, prefix: Prefix | None, *, same_prefix: int, now: float
) -> Replica:
    """Return one of `replicas`, of which there is at least one.

    `same_prefix` counts the requests under way with the prefix of the request, this one included. `now` is the event
    loop's time in seconds.
    """
    left = replicas
    for name in routing.strategies:
        if len(left) == 1:
            break
        if name == "prefix_aware":
            if prefix is not None:
                left = [_by_prefix(left, prefix.key, same_prefix, routing.overload_requests)]
        else:
            left = _STRATEGIES[name](left, now)
    return min(left, key=lambda replica: replica.last_used) if len(left) > 1 else left[0]


def _by_prefix(replicas: Sequence[Replica], key: int, same_prefix: int, most_above: int) -> Replica:
    """Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018, arXiv:1608.01350).

    Every prefix has its own order of the replicas, by rendezvous hashing (Thaler, Ravishankar, 1998), so a replica that
    comes or goes moves only its own share of the prefixes. A replica is overloaded if it has `most_above` requests
    under way more than the mean; then the next one in this order is chosen. The paper multiplies the mean by a factor.
    A factor splits the first groups of a batch, when the mean is small, and leaves some replicas with much longer
    queues at its end. Requests are counted, not their tokens: most prompt tokens come from the cache, and decoding
    takes the time. Three additions keep the loads even:

    - A new prefix goes to the less loaded one of the first `CHOICES` replicas in its order, as in partial key grouping
      (Nasir et al., ICDE 2015, arXiv:1504.00788): processes that each see only their own load balance the sum, and a
      prefix is computed at two replicas at most. If both are busy, it goes to one of the least loaded of all.
    - A prefix that was sent to a replica before goes there again, to the least loaded one if there are several.
    - A prefix with more requests under way than a replica's share, such as instructions without a question, is spread
      over as many replicas as it fills.
    """
    mean = (1 + sum(replica.in_flight for replica in replicas)) / len(replicas)
    bound = mean + most_above

    def rank(replica: Replica) -> int:
        return _mixed(key, replica.seed)

    spread = math.ceil(same_prefix / max(mean, UNSPREAD))
    if spread > 1:
        order = sorted(replicas, key=rank, reverse=True)
        best = min(order[:spread], key=lambda replica: replica.pending_tokens)
        return best if best.in_flight < bound else next(replica for replica in order if replica.in_flight < bound)
    knowing = [replica for replica in replicas if replica.in_flight < bound and replica.knows(key)]
    if knowing:
        return min(knowing, key=lambda replica: (replica.in_flight, -rank(replica)))
    fewest = min(replica.in_flight for replica in replicas)
    best = min(heapq.nlargest(CHOICES, replicas, key=rank), key=lambda replica: replica.in_flight)
    if best.in_flight < min(bound, fewest + SLACK):
        return best
    return max((replica for replica in replicas if replica.in_flight == fewest), key=rank)


def _mixed(key: int, seed: int) -> int:
    """Mix two numbers of 64 bits into one (the finalizer of SplitMix64: Steele, Lea, Flood, OOPSLA 2014)."""
    mixed = key ^ seed
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64
    return mixed ^ (mixed >> 31)


def _least_requests(replicas: Sequence[Replica], now: float) -> Sequence[Replica]:
    fewest = min(replica.in_flight for replica in replicas)
    return [replica for replica in replicas if replica.in_flight == fewest]


def _least_pending_tokens(replicas: Sequence[Replica], now: float) -> Sequence[Replica]:
    fewest = min(replica.pending_tokens for replica in replicas)
    return [replica for replica in replicas if replica.pending_tokens == fewest]


def _kv_cache(replicas: Sequence[Replica], now: float) -> Sequence[Replica]:
    """Those whose KV cache is used least; all of them if one is not known, which would be a guess."""
    read = [replica.cache_use(now, STALE_S) for replica in replicas]
    known = [use for use in read if use is not None]
    if len(known) < len(replicas):
        return replicas
    least = min(known)
    return [replica for replica, use in zip(replicas, known, strict=True) if use == least]


def _round_robin(replicas: Sequence[Replica], now: float) -> Sequence[Replica]:
    return [min(replicas, key=lambda replica: replica.last_used)]


_Strategy: TypeAlias = Callable[[Sequence[Replica], float], Sequence[Replica]]
_STRATEGIES: Mapping[RoutingStrategy, _Strategy] = {
    "least_requests": _least_requests,
    "kv_cache": _kv_cache,
    "least_pending_tokens": _least_pending_tokens,
    "round_robin": _round_robin,
}
