"""What is true of a simulated server, and what a client is told of it: the two need not agree.

A `Server` is a description and holds no state; `SimulatedServer` plays it. The model is that of a judge behind a rate
limit: the work of a request is hidden from the client, service takes the work times the server's seconds per unit times
noise, and beside the healthy life there are stragglers, errors and a schedule of faults.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

FaultKind = Literal["refuse", "hang", "slow", "errors", "throttle"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong from `start_s` (inclusive) to `end_s` (exclusive), in seconds of the simulation.

    Several faults of one kind in a row make a server that flaps. Raises `ValueError` for values that make no sense.
    """

    start_s: float
    end_s: float
    kind: FaultKind
    """`refuse`: connections are refused, and those that are open break when it begins. `hang`: what comes, and what is
    under way when it begins, is never answered. `slow`: a brownout, work goes on `factor` times slower. `errors`: a
    share `factor` of the requests that come fails with status 500. `throttle`: whatever comes gets a 429 that asks for
    a pause of `factor` seconds, whether a limit is broken or not."""
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("refuse", "hang", "slow", "errors", "throttle"):
            raise ValueError(f"a fault's kind is refuse, hang, slow, errors or throttle, not {self.kind!r}")
        if not 0 <= self.start_s < self.end_s:
            raise ValueError(f"a fault lasts from start_s to a later end_s, not {self.start_s!r} to {self.end_s!r}")
        if not (math.isfinite(self.factor) and self.factor >= 0):
            raise ValueError(f"the factor of a fault is a finite number from 0 on, not {self.factor!r}")
        if self.kind == "slow" and self.factor < 1:
            raise ValueError(f"a slow fault makes work take at least 1 times as long, not {self.factor!r} times")


@dataclass(frozen=True)
class Server:
    """The truth about one simulated server, and what its clients know.

    Times are seconds. Raises `ValueError` for limits that cannot be enforced.
    """

    name: str

    requests_per_minute: float | None = None
    """Requests it admits a minute. None: any number."""
    tokens_per_minute: float | None = None
    """Tokens it admits a minute, prompt and completion together, counted in sliding windows when a request arrives.
    None: any number."""
    concurrency: int | None = None
    """Requests it works on at once. None: any number."""
    window: Literal["sliding", "bucket"] = "sliding"
    """How requests are counted: at most the limit in any `window_s`, or a token bucket of `burst` that refills."""
    burst: int = 1
    """Size of the bucket."""
    window_s: float = 60.0
    """Length of the sliding windows; the limits are scaled to it and rounded down."""

    seconds_per_unit: float = 3.0
    """Service time of a request with a work of 1."""
    overhead_s: float = 0.05
    """What every answer takes beside that."""
    noise: float = 0.25
    """Sigma of the lognormal noise, with mean 1, on service times."""
    straggler_share: float = 0.0
    straggler_factor: float = 10.0
    """How much longer than others a straggler takes."""
    error_share: float = 0.0
    """Share of requests that fail with status 500, after `overhead_s` and 0.3 of their service time."""
    invalid_share: float = 0.0
    """Share of replies that are no valid verdict."""
    faults: tuple[Fault, ...] = ()

    declared: bool = True
    """Whether the client's configuration names the limits."""
    declares_window: bool = False
    """Whether the client's configuration also says how they are counted."""
    announces: Literal["right", "wrong"] | None = None
    """What replies say of the limits, as `x-ratelimit-*` headers do: the truth, `wrong_by` times the truth, nothing."""
    wrong_by: float = 3.0
    retry_after: Literal["seconds", "none"] = "seconds"
    """Whether a 429 says when to come back."""
    cancel_frees: bool = True
    """Whether a cancelled request gives its place back at once, or keeps it until the work would have ended."""
    network_s: tuple[float, float] = (0.01, 0.06)
    """From when to when after sending a request arrives, and is counted; uniform."""

    price_per_request: float = 0.0
    """US dollars."""
    price_per_million_tokens: float = 0.0
    """US dollars, for prompt and completion alike."""

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "concurrency", "window_s", "seconds_per_unit"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"Server.{name} must be a finite number above 0, not {value!r}")
        for name in ("overhead_s", "noise", "price_per_request", "price_per_million_tokens"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Server.{name} must be a finite number from 0 on, not {value!r}")
        for name in ("straggler_share", "error_share", "invalid_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"Server.{name} must be from 0 to 1, not {getattr(self, name)!r}")
        if not 0 <= self.network_s[0] <= self.network_s[1] < math.inf:
            raise ValueError(f"Server.network_s goes from a shortest to a longest delay, not {self.network_s!r}")
        if self.window not in ("sliding", "bucket"):
            raise ValueError(f"Server.window must be 'sliding' or 'bucket', not {self.window!r}")
        if self.window == "sliding" and self.requests_per_window == 0:
            raise ValueError(f"{self.name} admits less than one request in {self.window_s} s: make the window longer")
        if self.burst < 1:
            raise ValueError(f"Server.burst must be at least 1, not {self.burst!r}")

    @property
    def requests_per_window(self) -> int | None:
        """Requests in any `window_s`; None: any number."""
        return self._per_window(self.requests_per_minute)

    @property
    def tokens_per_window(self) -> int | None:
        """Tokens in any `window_s`; None: any number."""
        return self._per_window(self.tokens_per_minute)

    def limits(self) -> dict[str, Any]:
        """What a user who knows what this server declares would write to `limits:` of the source."""
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

    def price(self) -> dict[str, float]:
        """The `price:` node of our configuration for this server."""
        per_million = self.price_per_million_tokens
        return {
            "per_request": self.price_per_request,
            "input_per_million": per_million,
            "output_per_million": per_million,
        }

    def describe(self) -> str:
        """One line of everything that is not as it is by default, to be pasted into a test."""
        said = [f"{self.name!r}"]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                said.append(f"{field.name}={value!r}")
        return f"Server({', '.join(said)})"

    def _per_window(self, per_minute: float | None) -> int | None:
        # A product like 0.7 * 60 may come out a hair below the whole number that it means.
        return None if per_minute is None else math.floor(per_minute * self.window_s / 60.0 + 1e-9)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time in which nothing about a server's faults changes."""

    start_s: float
    end_s: float
    dead: bool
    """Whether it refuses or hangs."""
    hangs: bool
    """Whether it hangs, and does not refuse as well."""
    speed: float
    """Work done in a second, as a part of what a healthy server does; what is dead does none."""
    closed: bool
    """Whether no new request gets in: dead, or throttling everything."""


def phases(faults: Sequence[Fault]) -> tuple[Phase, ...]:
    """The phases of a schedule of faults, from 0 to infinity without gaps."""
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
