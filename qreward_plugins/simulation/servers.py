"""Describes simulated servers: their true limits and speed, and what they announce to a client, which may differ.

A `Server` has no state; `SimulatedServer` plays it. It models a judge behind a rate limit. The work of a request is
hidden from the client. Service takes work times the server's seconds per unit times noise. There are stragglers, errors
and scheduled faults.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..config import Batch
from .strict_limits import per_window

MOST_SERVERS = 5
LAST_FAULT_STARTS_S = 180.0
LEAST_TOKENS_PER_WINDOW = 40_000
"""Enough for any single request of a scenario's samples."""

_FAULTS: tuple[FaultKind, ...] = ("refuse", "hang", "slow", "errors", "throttle")
_FOR_GOOD = 0.1


def random_servers(rng: random.Random) -> list[Server]:
    """Draw from 1 to 5 servers. The same state of `rng` gives the same servers.

    Any of them may die permanently, even all. Every single request of a scenario's size fits into every server's
    limits.
    """
    return [_server(rng, f"s{number}") for number in range(rng.randint(1, MOST_SERVERS))]


def random_faults(rng: random.Random) -> tuple[Fault, ...]:
    """Draw a schedule of faults: none, a few single ones, or a repeated one (flapping)."""
    shape = rng.random()
    if shape < 0.4:
        return ()
    if shape < 0.6:
        start_s, every_s = rng.uniform(0, LAST_FAULT_STARTS_S / 2), rng.uniform(2, 30)
        kind, part = rng.choice(_FAULTS), rng.uniform(0.2, 0.8)
        factor = _factor(rng, kind)
        begins = [start_s + every_s * number for number in range(rng.randint(2, 6))]
        return tuple(Fault(begin_s, begin_s + part * every_s, kind, factor) for begin_s in begins)
    return tuple(_fault(rng) for _ in range(rng.randint(1, 3)))


def _fault(rng: random.Random) -> Fault:
    kind = rng.choice(_FAULTS)
    start_s = rng.choice((0.0, rng.uniform(0, 20), rng.uniform(0, LAST_FAULT_STARTS_S)))
    end_s = math.inf if rng.random() < _FOR_GOOD else start_s + rng.choice((0.5, 5.0, rng.uniform(1, 90)))
    return Fault(start_s, end_s, kind, _factor(rng, kind))


def _factor(rng: random.Random, kind: FaultKind) -> float:
    if kind == "slow":
        return rng.uniform(1.5, 20)
    if kind == "errors":
        return rng.choice((0.3, 0.7, 1.0))
    return rng.choice((0.0, 1.0, rng.uniform(0.1, 30)))


def _server(rng: random.Random, name: str) -> Server:
    window_s = rng.choice((60.0, 60.0, 60.0, 10.0, 1.0))
    sliding = rng.random() < 0.75
    # At least one request a window; a smaller limit is invalid.
    requests = rng.choice((None, rng.uniform(60, 600), rng.uniform(60, 3000), 60.0))
    tokens = rng.choice((None, None, rng.uniform(1, 10) * LEAST_TOKENS_PER_WINDOW * 60 / window_s))
    return Server(
        name,
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        concurrency=rng.choice((None, 1, rng.randint(2, 16), rng.randint(8, 96))),
        window="sliding" if sliding else "bucket",
        burst=1 if sliding else rng.randint(1, 20),
        window_s=window_s,
        seconds_per_unit=rng.choice((0.01, 0.3, 1.0, 3.0, 10.0)),
        overhead_s=rng.choice((0.0, 0.05, 0.5)),
        noise=rng.choice((0.0, 0.25, 1.0)),
        straggler_share=rng.choice((0.0, 0.02, 0.2)),
        straggler_factor=rng.choice((3.0, 10.0, 100.0)),
        error_share=rng.choice((0.0, 0.0, 0.02, 0.2, 0.5)),
        invalid_share=rng.choice((0.0, 0.0, 0.02, 0.3)),
        faults=random_faults(rng),
        declared=rng.random() < 0.7,
        declares_window=rng.random() < 0.5,
        announces=rng.choice((None, None, "right", "wrong")),
        wrong_by=rng.choice((0.2, 3.0)),
        retry_after=rng.choice(("seconds", "seconds", "none")),
        cancel_frees=rng.random() < 0.8,
        network_s=rng.choice(((0.0, 0.0), (0.01, 0.06), (0.0, 0.1))),
        price_per_request=rng.choice((0.0, 0.001)),
        price_per_million_tokens=rng.choice((0.0, 1.0)),
    )


FaultKind = Literal["refuse", "hang", "slow", "errors", "throttle"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault from `start_s` (inclusive) to `end_s` (exclusive), in seconds of the simulation.

    Several faults of one kind make a flapping server. Raises `ValueError` where it ends before it starts.
    """

    start_s: float
    end_s: float
    kind: FaultKind
    """`refuse`: connections are refused, and open ones break at its start. `hang`: requests during it, and in flight at
    its start, are never answered. `slow`: a brownout, work is `factor` times slower. `errors`: a share `factor` of the
    requests fails with status 500. `throttle`: every request gets a 429 with a pause of `factor` seconds, even within
    the limits."""
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s:
            raise ValueError(f"a fault needs 0 <= start_s < end_s, not {self.start_s!r} and {self.end_s!r}")


@dataclass(frozen=True)
class Server:
    """One simulated server, and what its clients know.

    Times are seconds. Raises `ValueError` for a window that admits nothing.
    """

    name: str

    requests_per_minute: float | None = None
    """Requests admitted per minute. None: any number."""
    tokens_per_minute: float | None = None
    """Tokens admitted per minute, prompt and completion together, counted in sliding windows when a request arrives.
    None: any number."""
    concurrency: int | None = None
    """Requests served at once. None: any number."""
    window: Literal["sliding", "bucket"] = "sliding"
    """How requests are counted: at most the limit in any `window_s`, or a token bucket of `burst` that refills."""
    burst: int = 1
    """Size of the bucket."""
    window_s: float = 60.0
    """Length of the sliding windows; the limits are scaled to it and rounded down."""

    seconds_per_unit: float = 3.0
    """Service time of a request with a work of 1."""
    overhead_s: float = 0.05
    """Seconds added to every answer."""
    noise: float = 0.25
    """Sigma of the lognormal noise, with mean 1, on service times."""
    straggler_share: float = 0.0
    straggler_factor: float = 10.0
    """Factor on the service time of a straggler."""
    error_share: float = 0.0
    """Share of requests that fail with status 500, after `overhead_s` and 0.3 of their service time."""
    invalid_share: float = 0.0
    """Share of replies without a valid verdict."""
    faults: tuple[Fault, ...] = ()

    declared: bool = True
    """Whether the client's configuration names the limits."""
    declares_window: bool = False
    """Whether the client's configuration also says how they are counted."""
    announces: Literal["right", "wrong"] | None = None
    """The limits announced by replies, as by `x-ratelimit-*` headers: the true ones, `wrong_by` times these, or none.
    """
    wrong_by: float = 3.0
    retry_after: Literal["seconds", "none"] = "seconds"
    """Whether a 429 has a Retry-After."""
    cancel_frees: bool = True
    """Whether a cancelled request frees its place at once, or only when its work would have ended."""
    network_s: tuple[float, float] = (0.01, 0.06)
    """Least and most seconds from sending a request to its arrival, where it is counted; uniform."""

    batch: Batch | None = None
    """How many calls one request may carry. It counts once against the limits of requests and concurrency, takes as
    long as its longest call and a tenth of the others, and fails as a whole. None: one."""

    price_per_request: float = 0.0
    """US dollars."""
    price_per_million_tokens: float = 0.0
    """US dollars, for prompt and completion alike."""

    def __post_init__(self) -> None:
        if self.window == "sliding" and self.requests_per_window == 0:
            raise ValueError(f"{self.name} admits less than one request in {self.window_s} s: make the window longer")

    @property
    def requests_per_window(self) -> int | None:
        """Requests in any `window_s`; None: any number."""
        return self._per_window(self.requests_per_minute)

    @property
    def tokens_per_window(self) -> int | None:
        """Tokens in any `window_s`; None: any number."""
        return self._per_window(self.tokens_per_minute)

    def source(self) -> dict[str, Any]:
        """The node of `sources:` in our configuration for this server."""
        per_million = self.price_per_million_tokens
        return {
            "kind": "openai",
            "base_url": "http://simulated.invalid/v1",
            "model": "simulated",
            "limits": self.limits(),
            "price": {
                "per_request": self.price_per_request,
                "input_per_million": per_million,
                "output_per_million": per_million,
            },
        }

    def limits(self) -> dict[str, Any]:
        """The `limits:` node of our configuration for this server."""
        if not self.declared:
            return {}
        node: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("requests_per_minute", "tokens_per_minute", "concurrency")
            if getattr(self, name) is not None
        }
        if self.window_s != 60.0:
            node["window_s"] = self.window_s
        if self.declares_window:
            node["window"] = self.window
            if self.window == "bucket":
                node["burst"] = self.burst
        return node

    def _per_window(self, per_minute: float | None) -> int | None:
        return None if per_minute is None else per_window(per_minute, self.window_s)


@dataclass(frozen=True, slots=True)
class Phase:
    """A period without a change in a server's faults."""

    start_s: float
    end_s: float
    dead: bool
    """Whether it refuses or hangs."""
    hangs: bool
    """Whether it hangs and does not refuse."""
    speed: float
    """Work per second, as a share of a healthy server's; 0 if it is dead."""
    closed: bool
    """Whether it admits no new request: it is dead, or throttles everything."""


def phases(faults: Sequence[Fault]) -> tuple[Phase, ...]:
    """The phases of scheduled faults, from 0 to infinity without gaps."""
    edges = sorted({0.0, math.inf, *(fault.start_s for fault in faults), *(fault.end_s for fault in faults)})
    found = []
    for start_s, end_s in itertools.pairwise(edges):
        present = [fault for fault in faults if fault.start_s <= start_s and end_s <= fault.end_s]
        kinds = {fault.kind for fault in present}
        dead = not kinds.isdisjoint({"refuse", "hang"})
        slowness = math.prod(fault.factor for fault in present if fault.kind == "slow")
        hangs = "hang" in kinds and "refuse" not in kinds
        found.append(Phase(start_s, end_s, dead, hangs, 0.0 if dead else 1.0 / slowness, dead or "throttle" in kinds))
    return tuple(found)
