"""The quota of a source whose limits several processes share: the same ledgers, with shares that change.

The share bounds what may be sent now, while it is valid. The whole limit bounds the size of a single request. Forecasts
use the larger of the share and an equal part, because a small share is raised as soon as more is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

from ..config.source_models import Limits
from .learned_limit import Heard, Learned, LearnedLimit
from .pace import JITTER_S
from .quota import Quota
from .window_limit import MARGIN_S, WindowLimit, window_with_margin

Resource: TypeAlias = Literal["requests", "tokens", "concurrency", "burst"]
"""What is shared: requests and tokens of a window, requests in flight, or the burst of a token bucket; a share of the
burst includes the same share of the bucket's rate."""

_ROUNDING = 1e-6


class SharedQuota(Quota):
    """The quota of one source of which this process has a share. The share is zero until `resize` sets it."""

    def __init__(self, limits: Limits, *, source: str, slots: int | None = None, jitter_s: float = JITTER_S) -> None:
        super().__init__(limits, source=source, slots=slots, jitter_s=jitter_s)
        self._whole = self._shares
        self.share: dict[Resource, float] = {}
        """This process's share of each limit that is declared, or was learned."""
        self.left_tokens = math.inf
        """Tokens of the whole limit that no process has spent, as the keeper said last; infinity before it has."""
        self.resize({}, workers=1, now=-math.inf)

    @property
    def source(self) -> str:
        """Name of the source."""
        return self._source

    @property
    def workers(self) -> int:
        """Number of workers that share the source."""
        return self._processes

    @property
    def learning(self) -> dict[Resource, LearnedLimit]:
        """The limits that are not declared, and of which the keeper or this process has heard."""
        limits = {window.unit: window.discovery for window in self._windows}
        return {unit: one for unit, one in limits.items() if isinstance(one, LearnedLimit) and one.known}

    def limits(self) -> dict[Resource, tuple[float, float]]:
        """Return the limits that are shared: (limit, window in seconds; 0: held until given back). The limit is
        infinity while the keeper learns it.
        """
        learning = {unit: (one.whole, window_with_margin(one.window_s)) for unit, one in self.learning.items()}
        return {**learning, **self.declared()}

    def learn(self, learned: Mapping[Resource, Learned], now: float) -> str:
        """Take over what the keeper has learned; return a log message if it is news, else ""."""
        words = []
        for window in self._windows:
            what, limit = learned.get(window.unit), window.discovery
            if what is None or not isinstance(limit, LearnedLimit) or not limit.learn(what, now):
                continue
            if what.origin:
                words.append(f"all workers learned a limit of {what.limit:g} {window.unit} in {what.window_s:g} s")
            elif limit.refuted_at == now:
                words.append(f"the learned limit of {window.unit} was wrong: no limit until the next 429")
        return "; ".join(words)

    def heard(self, now: float) -> dict[Resource, Heard]:
        """Return what this process heard of each limit that is learned, since the last call."""
        return {unit: one.take(now) for unit, one in self.learning.items()}

    def declared(self) -> dict[Resource, tuple[float, float]]:
        """Return the declared limits that are shared."""
        whole = self._whole
        limits: dict[Resource, tuple[float, float]] = {}
        if self._limits.window == "bucket" and whole.requests < math.inf:
            limits["burst"] = (float(whole.burst), whole.burst / whole.pace_per_s + MARGIN_S)
        elif whole.requests < math.inf:
            limits["requests"] = (whole.requests, self.requests.window_s)
        if whole.tokens < math.inf:
            limits["tokens"] = (whole.tokens, self.tokens.window_s)
        if self._limits.concurrency is not None:
            limits["concurrency"] = (float(self._limits.concurrency), 0.0)
        return limits

    def spent(self, resource: Resource, now: float) -> tuple[tuple[float, float], ...]:
        """Return what this process has spent of a limit: (seconds until it leaves the window, amount)."""
        if resource == "requests":
            return self.requests.outlook(now)
        if resource == "tokens":
            return self.tokens.outlook(now)
        if resource == "concurrency" and self.in_flight:
            return ((math.inf, float(self.in_flight)),)
        return ()

    def used(self, resource: Resource, now: float) -> float:
        """Return how much of a limit, other than a bucket, this process has spent: the sum of `spent`."""
        if resource == "concurrency":
            return float(self.in_flight)
        return (self.requests if resource == "requests" else self.tokens).spent(now)

    def refilled_in_s(self, now: float) -> float:
        """Return the seconds until this process's part of the bucket is full; infinity while a request is held, because
        it may be written at any time.
        """
        pace = self._pacing.pace
        if pace is None:
            return 0.0
        return math.inf if self.requests.held > 0 else pace.refilled_in_s(now)

    def drained(self, now: float) -> float:
        """Return how many requests this process's part of the bucket is below full, if those that are held are written
        now.
        """
        pace = self._pacing.pace
        return pace.drained(now) + self.requests.held if pace is not None else 0.0

    def resize(self, share: Mapping[Resource, float], *, workers: int, now: float) -> None:
        """Set the shares of all limits, zero for those that `share` omits. What was spent stays spent.

        `workers` is the number of workers that share the source.
        """
        whole = self._whole
        self.share = {name: share.get(name, 0.0) for name, (limit, _) in self.limits().items() if limit < math.inf}
        self._processes = max(1, workers)
        # As long as a process is alone, it hears all that there is to hear. There is no way back: a new keeper knows
        # one worker first.
        for window in self._windows if self._processes > 1 else ():
            window.learn_by(LearnedLimit)
        if self._window is not None:
            self._window.divide(self._processes)
            self.concurrency = int(self._window.size)
        for unit, learned in self.learning.items():
            part = self.share.get(unit, math.inf)
            learned.ledger.limit = math.floor(part + _ROUNDING) if unit == "requests" and part < math.inf else part
        new = whole
        if "burst" in self.share:
            burst = math.floor(self.share["burst"] + _ROUNDING)
            pace_per_s = whole.pace_per_s * burst / whole.burst
            new = replace(new, requests=whole.requests if burst else 0.0, burst=burst, pace_per_s=pace_per_s)
        elif "requests" in self.share and whole.requests < math.inf:
            requests = float(math.floor(self.share["requests"] + _ROUNDING))
            burst = max(1, math.floor(whole.burst * requests / whole.requests))
            new = replace(new, requests=requests, burst=burst, pace_per_s=whole.pace_per_s * requests / whole.requests)
        if "tokens" in self.share and whole.tokens < math.inf:
            new = replace(new, tokens=self.share["tokens"])
        if "concurrency" in self.share:
            concurrency = math.floor(self.share["concurrency"] + _ROUNDING)
            new = replace(new, concurrency=min(concurrency, self._slots or concurrency))
        self._shares = new
        for window, part in zip(self._windows, (new.requests, new.tokens), strict=True):
            if part < math.inf:
                window.ledger.limit = part
        if new.concurrency is not None:
            self.concurrency = new.concurrency
        if self._pacing.pace is not None and new.pace_per_s > 0:
            self._pacing.pace.change(new.pace_per_s, new.burst, now)

    def left(self, now: float) -> float:
        own = self.tokens.spent(now) - self.tokens.held
        return max(super().left(now), min(self.left_tokens, self._whole.tokens - own))

    def per_window(self) -> tuple[float, float]:
        requests, window_s = super().per_window()
        return self._likely(self._requests, requests, self._whole.requests), window_s

    def tokens_per_window(self) -> float:
        return self._likely(self._tokens, super().tokens_per_window(), self._whole.tokens)

    def _likely(self, window: WindowLimit, share: float, declared: float) -> float:
        if share == math.inf:
            return share
        limit = window.discovery
        whole = limit.whole if isinstance(limit, LearnedLimit) and limit.known else declared
        return max(share, whole / self._processes)

    def retune(self, limits: Limits, now: float) -> None:
        kept, processes = self.share, self._processes
        self._processes = 1
        try:
            super().retune(limits, now)
        finally:
            self._processes = processes
        self._whole = self._shares
        # A limit that was not shared before starts with a share of zero; a lowered one caps its share.
        self.resize(
            {resource: min(kept.get(resource, 0.0), limit) for resource, (limit, _) in self.limits().items()},
            workers=processes,
            now=now,
        )
        if self._pacing.pace is not None and not self.share.get("burst", 1.0):
            # Without a share of the bucket its rate is unknown, so earlier requests count at the lowest rate.
            self._pacing.pace.change(self._whole.pace_per_s / self._whole.burst, 1, now)
