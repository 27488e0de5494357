"""curator's online request processor, bespokelabsai/curator at 8f26600e (0.1.27),
src/bespokelabs/curator/request_processor/online/base_online_request_processor.py `process_requests_from_file` and
status_tracker/online_status_tracker.py.

curator pins a dozen providers' SDKs at versions that exclude the other peers here, so the policy is rebuilt after the
source: samples start in order, each when the request and token buckets (which begin at one request and no tokens,
refill evenly, and are looked at every 0.1 s) have room, the first in line holding up all others; a 429 stops every new
start for 10 s after it; failures wait in a queue until all first tries have ended, and then go the same way, up to 10
times each; tokens are estimated by a moving average of 50 replies and corrected when a reply comes. What was not taken
over: its retry loop takes a semaphore slot each time it finds nothing to do, and never gives that one back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from .base import Peer as BasePeer
from .stage import HTTPFailure, Item, NetworkFailure, Stage, weighted_cycle

POLL_S = 0.1
PAUSE_S = 10.0
RETRIES = 10
REPLIES_AVERAGED = 50


class _Buckets:
    """Requests and tokens that may go now; the time is the loop's."""

    def __init__(self, rpm: float | None, tpm: float | None) -> None:
        self.rpm, self.tpm = rpm, tpm
        self.requests, self.tokens = 1.0, 0.0
        self.updated_at = asyncio.get_running_loop().time()

    def has(self, tokens: float) -> bool:
        now = asyncio.get_running_loop().time()
        passed, self.updated_at = now - self.updated_at, now
        if self.rpm is not None:
            self.requests = min(self.rpm, self.requests + self.rpm * passed / 60)
        if self.tpm is not None:
            self.tokens = min(self.tpm, self.tokens + self.tpm * passed / 60)
        return (self.rpm is None or self.requests >= 1) and (self.tpm is None or self.tokens >= tokens)

    def take(self, tokens: float) -> None:
        self.requests -= 1
        self.tokens -= tokens


class Peer(BasePeer):
    """One processor for all sources, behind a load balancer that shares requests among them by their limits:
    max_requests_per_minute, max_tokens_per_minute and max_concurrent_requests are the sums (rpm and tpm left out unless
    all sources declare one), max_retries 10, seconds_to_pause_on_rate_limit 10 (both the defaults), request_timeout
    60 s.
    """

    def __init__(self, stage: Stage, variant: str, scored: Callable[[Item], None]) -> None:
        super().__init__(stage, variant, scored)
        self._sources = weighted_cycle(stage.weights())
        self._semaphore = asyncio.Semaphore(stage.in_flight)
        self._buckets = _Buckets(stage.total("requests_per_minute"), stage.total("tokens_per_minute"))
        self._replies: deque[int] = deque(maxlen=REPLIES_AVERAGED)
        self._throttled_at = -PAUSE_S

    async def batch(self, items: Sequence[Item], arrivals: Sequence[float]) -> list[Item]:
        started_at = asyncio.get_running_loop().time()
        again: asyncio.Queue[Item] = asyncio.Queue()
        retries_left = {item.id: RETRIES for item in items}
        given_up: list[Item] = []

        async def attempt(item: Item, blocked: float) -> None:
            try:
                await self._attempt(item, blocked)
            except (HTTPFailure, NetworkFailure, asyncio.TimeoutError, ValueError):
                if retries_left[item.id] > 0:
                    retries_left[item.id] -= 1
                    again.put_nowait(item)
                else:
                    given_up.append(item)
            finally:
                self._semaphore.release()

        first_tries = []
        for item, arrival_s in zip(items, arrivals, strict=True):
            await asyncio.sleep(max(0.0, started_at + arrival_s - asyncio.get_running_loop().time()))
            await self._semaphore.acquire()
            first_tries.append(asyncio.ensure_future(attempt(item, await self._room(item))))
        await asyncio.gather(*first_tries)
        pending: set[asyncio.Future[None]] = set()
        while pending or not again.empty():
            if not again.empty():
                await self._semaphore.acquire()
                item = again.get_nowait()
                pending.add(asyncio.ensure_future(attempt(item, await self._room(item))))
            _, pending = await asyncio.wait(pending, timeout=POLL_S)
        return given_up

    async def score(self, item: Item) -> float:
        raise NotImplementedError("curator knows batches only")

    async def _room(self, item: Item) -> float:
        """Wait until this item may go, and take its room; returns the tokens taken."""
        completion = sum(self._replies) / len(self._replies) if self._replies else item.max_completion_tokens // 4
        tokens = item.prompt_tokens + completion
        while not self._buckets.has(tokens):  # noqa: ASYNC110 -- polling is its policy
            await asyncio.sleep(POLL_S)
        pause_s = self._throttled_at + PAUSE_S - asyncio.get_running_loop().time()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
            self._buckets.updated_at = asyncio.get_running_loop().time()
        self._buckets.take(tokens)
        return tokens

    async def _attempt(self, item: Item, blocked: float) -> None:
        try:
            answer = await self.stage.ask(next(self._sources), item)
        except HTTPFailure as failure:
            if failure.status == 429:
                self._throttled_at = asyncio.get_running_loop().time()
            raise
        _ = answer.score
        self._replies.append(answer.completion_tokens)
        self._buckets.tokens += blocked - answer.prompt_tokens - answer.completion_tokens
        self.scored(item)
