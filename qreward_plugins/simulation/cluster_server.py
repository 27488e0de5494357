"""A server that many workers share: it admits everything, and records every broken limit.

A real server would throttle excess requests, and the workers would slow down, so a broken promise would not show. The
arrival of a request here counts, not its sending time. A completion counts at some time between the arrival of its
request and its end, because providers differ in that.
"""

from __future__ import annotations

import math
import random

from .cluster_plan import SharedSource
from .strict_limits import RequestBucket, Window


class RecordingServer:
    """One source's server. Times are true seconds."""

    def __init__(self, source: SharedSource, rng: random.Random) -> None:
        limits = source.declared()
        self.broken: list[str] = []
        self.came = 0
        """Requests that arrived."""
        self.came_from: dict[str, int] = {}
        self._source = source
        self._counts_at = rng.choice((0.0, 0.5, 1.0))
        self._window: Window | None = None
        self._bucket: RequestBucket | None = None
        if limits.requests_per_minute is not None and limits.window == "bucket":
            self._bucket = RequestBucket(limits.requests_per_minute, limits.burst)
        elif limits.requests_per_minute is not None:
            per_window, window_s = limits.requests_per_minute * limits.window_s / 60.0, limits.window_s
            if per_window < 1:
                per_window, window_s = 1.0, 60.0 / limits.requests_per_minute
            self._window = Window(math.floor(per_window + 1e-9), window_s)
        self._tokens: Window | None = None
        if limits.tokens_per_minute is not None:
            self._tokens = Window(math.floor(limits.tokens_per_minute * limits.window_s / 60.0 + 1e-9), limits.window_s)
        self._concurrency = limits.concurrency or math.inf
        self._in_flight: set[object] = set()

    def counts_completion_at(self, came_at: float, ends_at: float) -> float:
        """When the completion of a request counts."""
        return came_at + self._counts_at * (ends_at - came_at)

    def come(self, request: object, worker: str, prompt_tokens: float, now: float) -> None:
        """A request arrives."""
        self.came += 1
        self.came_from[worker] = self.came_from.get(worker, 0) + 1
        if self._window is not None:
            self._window.enter(1, now)
            used = self._window.used(now)
            if used > self._window.limit:
                self._break(f"{used} requests in {self._window.window_s:g} s, {self._window.limit} allowed", now)
        if self._bucket is not None:
            if self._bucket.wait_s(1, now) > 0:
                self._break(f"the bucket is empty for {self._bucket.wait_s(1, now):.4f} s more", now)
            self._bucket.enter(1, now)
        self.spend(prompt_tokens, now)
        self._in_flight.add(request)
        if len(self._in_flight) > self._concurrency:
            self._break(f"{len(self._in_flight)} in flight, {self._concurrency:g} allowed", now)

    def spend(self, tokens: float, now: float) -> None:
        """Count tokens."""
        if self._tokens is not None and tokens > 0:
            self._tokens.enter(math.ceil(tokens), now)
            used = self._tokens.used(now)
            if used > self._tokens.limit:
                self._break(f"{used} tokens in {self._tokens.window_s:g} s, {self._tokens.limit} allowed", now)

    def end(self, request: object) -> None:
        """A request ends, or its connection does."""
        self._in_flight.discard(request)

    def works_on(self, request: object) -> bool:
        """Whether a request is in flight here."""
        return request in self._in_flight

    def _break(self, what: str, now: float) -> None:
        self.broken.append(f"{self._source.key} at {now:.4f}: {what}")
