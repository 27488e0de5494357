"""The plan of a simulated cluster: the limits and work of its workers, and all faults.

A plan is drawn from a seed and can be read before it is played. Random events during play (how long a message takes,
whether it is lost) come from the same seed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, Literal

from ..config import Limits

ClusterFaultKind = Literal["kill", "stop", "part", "loss", "kill keeper", "stop keeper", "slow keeper"]

MOST_SENT = 400
"""Most requests of one source, so that a plan runs in milliseconds."""
_LAST_FAULT_S = 90.0
_KINDS = (
    ("requests",),
    ("requests",),
    ("tokens",),
    ("concurrency",),
    ("bucket",),
    ("bucket",),
    ("requests", "tokens"),
    ("requests", "concurrency"),
    ("tokens", "concurrency"),
    ("bucket", "concurrency"),
    ("bucket", "tokens"),
    ("requests", "tokens", "concurrency"),
)


@dataclass(frozen=True)
class SharedSource:
    """A server with strict limits, and its latencies."""

    key: str
    limits: dict[str, Any]
    """As in the configuration."""
    way_s: tuple[float, float]
    """Least and most seconds that a request takes to reach it."""
    service_s: tuple[float, float]
    """Least and most seconds that it works on a request."""
    connect_s: tuple[float, float] = (0.0, 0.0)
    """Least and most seconds from the reservation of a request to its writing."""

    def declared(self) -> Limits:
        """The limits, for the quotas."""
        return Limits.model_validate(self.limits)


@dataclass(frozen=True)
class Work:
    """`count` requests for a worker, every `every_s` seconds from `at_s` on."""

    at_s: float
    worker: int
    source: str
    count: int
    every_s: float = 0.0
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    """The most tokens that are requested; the answer has between none and all of them."""


@dataclass(frozen=True)
class ClusterFault:
    """A fault at `at_s` that lasts `lasts_s` seconds; a killed worker stays dead."""

    at_s: float
    kind: ClusterFaultKind
    worker: int = -1
    lasts_s: float = 0.0


@dataclass(frozen=True)
class Worker:
    """A worker process: when it starts, whether it leaves after its work, and its clock."""

    joins_s: float = 0.0
    leaves: bool = False
    clock: tuple[float, float] = (0.0, 1.0)
    """Its initial time in seconds, and its seconds per true second."""


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before play."""

    seed: int
    sources: tuple[SharedSource, ...]
    workers: tuple[Worker, ...]
    work: tuple[Work, ...]
    faults: tuple[ClusterFault, ...] = ()
    message_s: tuple[float, float] = (0.001, 0.01)
    """Least seconds of a message, and the mean of its additional seconds."""
    lost: float = 0.0
    """Share of the messages that are lost."""
    doubled: float = 0.0
    """Share of the messages that arrive twice."""
    restarts: bool = True
    """Whether a killed keeper restarts under the same name; otherwise the worker that notices starts one."""
    keeper_clock: tuple[float, float] = (0.0, 1.0)

    def describe(self) -> str:
        """The plan as text."""
        lines = [
            f"seed {self.seed}: {len(self.workers)} workers, messages {self.message_s}, lost {self.lost:.0%}, doubled"
            f" {self.doubled:.0%}, keeper {'restarts' if self.restarts else 'is started by a worker that notices'}"
        ]
        lines += [f"  {source}" for source in self.sources]
        lines += [f"  {number}: {worker}" for number, worker in enumerate(self.workers) if len(self.workers) <= 12]
        lines += [f"  {work}" for work in self.work[:20]]
        lines += [f"  {fault}" for fault in self.faults]
        return "\n".join(lines)

    def quiet_at(self) -> float:
        """When all faults are over and all work has come."""
        ends = [work.at_s + work.count * work.every_s for work in self.work]
        ends += [fault.at_s + fault.lasts_s for fault in self.faults]
        ends += [worker.joins_s for worker in self.workers]
        return max(ends, default=0.0)


def random_plan(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"cluster {seed}")
    workers = _workers(rng)
    sources = tuple(_source(rng, f"s{number}") for number in range(rng.choice((1, 1, 2, 3))))
    return Plan(
        seed,
        sources,
        workers,
        tuple(work for source in sources for work in _work(rng, source, workers)),
        tuple(sorted(_faults(rng, len(workers)), key=lambda fault: fault.at_s)),
        message_s=(rng.choice((0.0005, 0.005)), rng.choice((0.001, 0.01, 0.05, 0.3))),
        lost=rng.choice((0.0, 0.0, 0.02, 0.05)),
        doubled=rng.choice((0.0, 0.0, 0.2)),
        restarts=rng.random() < 0.5,
        keeper_clock=_clock(rng),
    )


def _clock(rng: random.Random) -> tuple[float, float]:
    return rng.uniform(-1e6, 1e6), 1.0 + rng.choice((0.0, 1e-4, -1e-4, rng.uniform(-1e-4, 1e-4)))


def _workers(rng: random.Random) -> tuple[Worker, ...]:
    count = rng.choice((1, 2, 2, 3, 4, 6, 8, 12))
    return tuple(
        Worker(
            rng.choice((0.0, 0.0, rng.uniform(0, 3), rng.uniform(0, 60))),
            rng.random() < 0.3,
            _clock(rng),
        )
        for _ in range(count)
    )


def _source(rng: random.Random, key: str) -> SharedSource:
    window_s = rng.choice((60.0, 60.0, 10.0, 3.0, 1.0))
    limits: dict[str, Any] = {"window_s": window_s, "window": "sliding"}
    kinds = rng.choice(_KINDS)
    if "requests" in kinds:
        limits["requests_per_minute"] = rng.choice((1, 2, 3, rng.randint(1, 30), rng.randint(10, 200))) * 60 / window_s
        limits["window"] = rng.choice(("sliding", "auto"))
        if rng.random() < 0.1:
            limits["requests_per_minute"] *= 0.4
    if "bucket" in kinds:
        limits["window"] = "bucket"
        limits["burst"] = rng.choice((1, 1, 2, 3, rng.randint(1, 20)))
        limits["requests_per_minute"] = rng.choice((6.0, 30.0, 60.0, rng.uniform(20, 600)))
    if "tokens" in kinds:
        limits["tokens_per_minute"] = rng.choice((2_000, 20_000, 200_000)) * 60 / window_s
    if "concurrency" in kinds:
        limits["concurrency"] = rng.choice((1, 2, rng.randint(1, 8), rng.randint(4, 64)))
    way_s = rng.choice((0.0, 0.01, 0.2))
    # A bucket of one request is paced with a smaller margin, because a larger one would cost speed.
    spread_s = rng.choice((0.0, 0.045)) if "bucket" in kinds else rng.choice((0.0, 0.05, 0.12))
    connect_s = rng.choice((0.0, 0.05, 0.5, 3.0, 12.0))
    service_s = rng.choice((0.02, 0.5, 3.0, 20.0))
    return SharedSource(key, limits, (way_s, way_s + spread_s), (0.3 * service_s, 1.7 * service_s), (0.0, connect_s))


def _work(rng: random.Random, source: SharedSource, workers: tuple[Worker, ...]) -> list[Work]:
    shape = rng.choice(("burst", "burst", "one", "stream", "waves", "moving", "skewed"))
    limits = source.declared()
    allowed = min(MOST_SENT, max(4, 2 * _per_minute(source, limits)))
    total = rng.choice((allowed / 4, allowed / 2, allowed))
    found: list[Work] = []

    def add(at_s: float, worker: int, count: float, every_s: float = 0.0) -> None:
        if count >= 1:
            at_s = max(at_s, workers[worker].joins_s)
            prompt, completion = _tokens(rng, limits)
            found.append(Work(at_s, worker, source.key, int(count), every_s, prompt, completion))

    everybody = range(len(workers))
    if shape == "burst":
        for worker in everybody:
            add(rng.choice((0.0, rng.uniform(0, 20))), worker, max(1, total / len(workers)))
    elif shape == "one":
        add(rng.uniform(0, 10), rng.choice(everybody), total)
    elif shape == "stream":
        for worker in everybody:
            count = max(1, total / len(workers))
            add(rng.uniform(0, 5), worker, count, rng.uniform(0.5, 2) * 60 / count)
    elif shape == "waves":
        for number in range(3):
            for worker in everybody:
                add(number * rng.uniform(10, 40), worker, max(1, total / len(workers) / 3))
    elif shape == "moving":
        for number, worker in enumerate(everybody):
            add(number * rng.uniform(1, 30), worker, max(1, total / len(workers)))
    else:
        for number, worker in enumerate(everybody):
            add(rng.uniform(0, 2), worker, max(1, total / 2 ** (number + 1)))
    return found


def _per_minute(source: SharedSource, limits: Limits) -> float:
    least = math.inf
    if limits.requests_per_minute is not None:
        least = limits.requests_per_minute
    if limits.concurrency is not None:
        least = min(least, limits.concurrency * 60 / source.service_s[1])
    if limits.tokens_per_minute is not None:
        least = min(least, 20.0 * 60 / limits.window_s)
    return least


def _tokens(rng: random.Random, limits: Limits) -> tuple[float, float]:
    if limits.tokens_per_minute is None:
        return rng.choice(((0.0, 0.0), (100.0, 50.0)))
    whole = limits.tokens_per_minute * limits.window_s / 60.0
    part = rng.choice((0.01, 0.05, 0.05, 0.2, 0.6, 1.0)) * whole
    prompt = rng.uniform(0.1, 0.9) * part
    return float(math.floor(prompt)), float(math.floor(part - prompt))


def _faults(rng: random.Random, workers: int) -> list[ClusterFault]:
    if rng.random() < 0.25:
        return []
    found: list[ClusterFault] = []
    # Simultaneous faults are worse than single ones.
    first_s, last_s = rng.choice(((0.0, _LAST_FAULT_S), (0.0, _LAST_FAULT_S), (8.0, 11.0), (20.0, 30.0)))
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        at_s, lasts_s = rng.uniform(first_s, last_s), rng.choice((0.3, 2.0, 8.0, 15.0, 30.0, 90.0))
        kinds: tuple[ClusterFaultKind, ...] = (
            "kill", "stop", "stop", "part", "part", "loss", "kill keeper", "kill keeper", "stop keeper", "slow keeper"
        )  # fmt: skip
        kind = rng.choice(kinds)
        found.append(
            ClusterFault(at_s, kind, rng.randrange(workers) if kind in ("kill", "stop", "part") else -1, lasts_s)
        )
    if rng.random() < 0.15:  # a keeper that dies repeatedly
        start_s, every_s = rng.uniform(0, 40), rng.choice((1.0, 5.0, 12.0, 25.0))
        found += [ClusterFault(start_s + every_s * number, "kill keeper") for number in range(rng.randint(2, 5))]
    return found
