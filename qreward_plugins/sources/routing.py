"""The strategies by which a request is routed to one of the replicas of a source.

A strategy narrows the replicas down. If one is left, that one is chosen; if several are equal, or the strategy does not
know enough, the next strategy goes on with them. In the end, the one that was used least recently is chosen.

`shared_prefix` finds what siblings share, and `CacheUse` reads how full the KV caches of the servers are.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeAlias

import aiohttp
from yarl import URL

from ..config.source_models import RoutingStrategy
from ..replicas.control import fetched
from .base import Request, texts_in
from .replica import Replica

BYTES_PER_TOKEN = 4
"""Bytes of English text for each token."""
_UNKNOWN_TOKENS = 1024
"""Tokens of a prompt without a response in it that count as shared."""
_SHORTEST_RESPONSE = 16
"""A shorter response may occur in the question, too, so its place in a prompt is not looked for."""


def shared_prefix(request: Request) -> int | None:
    """Return a hash of the shared part of a request; None if there is no text in it.

    The hash (BLAKE2b, RFC 7693) is the same in every process, so that the siblings of a group that are scored in
    different processes go to the same replica.
    """
    ends = True
    if request.passed is not None:
        pieces, ends = list(_texts_of(request.passed.body)), False
    elif request.messages:
        pieces, ends = _before_the_response(request)
    else:
        # Scoring services get the sample; the question is what its siblings share.
        pieces = list(texts_in(request.sample.messages))
    hashed, size = hashlib.blake2b(digest_size=8), 0
    for piece in pieces:
        data = piece.encode("utf-8", "surrogatepass")
        if not ends:
            data = data[: _UNKNOWN_TOKENS * BYTES_PER_TOKEN - size]
        hashed.update(len(data).to_bytes(8, "big"))
        hashed.update(data)
        size += len(data)
    return int.from_bytes(hashed.digest(), "big") if size else None


def _before_the_response(request: Request) -> tuple[list[str], bool]:
    """Return the texts before the response, and whether the response was found."""
    response: object = request.sample.response
    sought = request.nonce
    if not sought and isinstance(response, str) and len(response) >= _SHORTEST_RESPONSE:
        sought = response
    pieces: list[str] = []
    for text in texts_in(request.messages):
        found = text.find(sought) if sought else -1
        if found >= 0:
            return [*pieces, text[:found]], True
        pieces.append(text)
    return pieces, False


def _texts_of(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a client's own request, in the order in which servers write them into the prompt."""
    for key in ("system", "instructions", "messages", "input", "contents"):
        value = body.get(key)
        if isinstance(value, str):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from texts_in(value)


EVERY_S = 1.0
"""Seconds between two readings of a replica."""
WITHIN_S = 3.0
"""Seconds for a reading. vLLM under load takes half a second."""

_CACHE_USE = (
    b"vllm:kv_cache_usage_perc",
    b"vllm:gpu_cache_usage_perc",
    b"sglang:token_usage",
    b"llamacpp:kv_cache_usage_ratio",
)
"""Shares from 0 to 1 in all of them, vLLM's too. The second is that of older versions of vLLM."""
_WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs", b"llamacpp:requests_deferred")


class CacheUse:
    """Keeps the readings of replicas fresh while they are used. `verify_tls` is that of their source.

    It sends no key: the metrics of these servers are open, and a key must not go where none is needed.
    """

    def __init__(self, *, verify_tls: bool) -> None:
        self._verify_tls = verify_tls
        self._task: asyncio.Task[None] | None = None
        self._read_at = -math.inf
        self._closed = False

    def refresh(self, replicas: Sequence[Replica], now: float) -> None:
        """Start a reading of `replicas` in the background if the last one is old; `now` is the event loop's time."""
        if self._closed or 0 <= now - self._read_at < EVERY_S:
            return
        task = self._task
        if task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop():
            return
        self._read_at = now
        self._task = asyncio.get_running_loop().create_task(self._read_all(tuple(replicas)), name="qreward-kv-cache")

    async def aclose(self) -> None:
        """End the reading that is under way. Idempotent."""
        self._closed = True
        task, self._task = self._task, None
        if task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait([task])

    async def _read_all(self, replicas: Iterable[Replica]) -> None:
        await asyncio.gather(*map(self._read, replicas))

    async def _read(self, replica: Replica) -> None:
        use, waiting, url = None, 0.0, metrics_url(replica.base_url)
        try:
            status, metrics = await fetched("GET", url, within_s=WITHIN_S, verify_tls=self._verify_tls)
            if status == 200 and metrics is not None:
                use, waiting = cache_use_in(metrics), waiting_in(metrics)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            pass  # a server without metrics has no reading, and what is wrong with it shows in its calls
        replica.cache_read(use, waiting, asyncio.get_running_loop().time())


def metrics_url(base_url: str) -> URL:
    """Return the address of a server's metrics: `/metrics`, beside the `/v1` of its API."""
    url = URL(base_url)
    path = url.path.rstrip("/")
    return url.with_path(f"{path.removesuffix('/v1')}/metrics")


def cache_use_in(metrics: bytes) -> float | None:
    """Return the share of the KV cache that is in use, from 0 to 1; None if the metrics do not say it. Of several
    engines in a server, the fullest counts.
    """
    return max((share for share in _values(metrics, _CACHE_USE) if 0.0 <= share <= 1.0), default=None)


def waiting_in(metrics: bytes) -> float:
    """Return how many requests wait in the server's own queue, of all its engines together; 0 if it does not say."""
    return sum(count for count in _values(metrics, _WAITING) if 0.0 <= count < 1e9)


def _values(metrics: bytes, names: Iterable[bytes]) -> Iterator[float]:
    text = b"\n" + metrics
    for name in names:
        at = text.find(b"\n" + name)
        while at >= 0:
            end = text.find(b"\n", at + 1)
            line = text[at + 1 : None if end < 0 else end]
            # Of the rest of the line, the labels are in braces, and a time may follow the value.
            words = line[len(name) :].rpartition(b"}")[2].split()
            if line[len(name) : len(name) + 1] in (b"{", b" ", b"\t") and words:
                with suppress(ValueError):
                    yield float(words[0])
            at = text.find(b"\n" + name, at + 1)


STALE_S = 5.0
"""Seconds after which a reading of a KV cache does not count any more."""
CHOICES = 2
"""The replicas among which a new prefix chooses before others. They are the same in all processes."""
OVERLOAD = 6
"""How many requests more than the mean of all replicas one may have under way, before others get its prefixes."""
SLACK = 3
"""How many requests more than the least loaded of all replicas one of these may have. A process sees only its own."""
UNSPREAD = 8
"""Requests with one prefix that are not spread, however low the load is."""

_64 = (1 << 64) - 1


def chosen(
    replicas: Sequence[Replica],
    strategies: Sequence[RoutingStrategy],
    prefix: int | None,
    *,
    same_prefix: int,
    now: float,
) -> Replica:
    """Return one of `replicas`, of which there is at least one.

    `same_prefix` counts the requests under way with the prefix of the request, this one included. `now` is the event
    loop's time in seconds.
    """
    left = replicas
    for name in strategies:
        if len(left) == 1:
            break
        if name == "prefix_aware":
            if prefix is not None:
                left = [_by_prefix(left, prefix, same_prefix)]
        else:
            left = _STRATEGIES[name](left, now)
    return min(left, key=lambda replica: replica.last_used) if len(left) > 1 else left[0]


def _by_prefix(replicas: Sequence[Replica], key: int, same_prefix: int) -> Replica:
    """Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018, arXiv:1608.01350).

    Every prefix has its own order of the replicas, by rendezvous hashing (Thaler, Ravishankar, 1998), so a replica that
    comes or goes moves only its own share of the prefixes. A replica is overloaded if it has `OVERLOAD` requests
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
    bound = mean + OVERLOAD

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


def _least(replicas: Sequence[Replica], load: Callable[[Replica], Any]) -> Sequence[Replica]:
    loads = [load(replica) for replica in replicas]
    fewest = min(loads)
    return [replica for replica, each in zip(replicas, loads, strict=True) if each == fewest]


def _kv_cache(replicas: Sequence[Replica], now: float) -> Sequence[Replica]:
    """Those whose servers have the fewest requests waiting, and of these the ones whose KV cache is used least; all of
    them if one is not known, which would be a guess.
    """
    if any(replica.cache_use(now, STALE_S) is None for replica in replicas):
        return replicas
    return _least(replicas, lambda replica: (replica.waiting, replica.cache_use(now, STALE_S)))


_Strategy: TypeAlias = Callable[[Sequence[Replica], float], Sequence[Replica]]
_STRATEGIES: Mapping[RoutingStrategy, _Strategy] = {
    "least_requests": lambda replicas, now: _least(replicas, attrgetter("in_flight")),
    "kv_cache": _kv_cache,
    "least_pending_tokens": lambda replicas, now: _least(replicas, attrgetter("pending_tokens")),
    "round_robin": lambda replicas, now: _least(replicas, attrgetter("last_used")),
}
