"""The plan of a simulated cluster: the limits and work of its workers, and all faults.

A plan is drawn from a seed and can be read before it is played. How long a message takes comes from the same seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pprint import pformat
from typing import Any, Literal

from ..config import Limits
from .scenarios import JUDGE, bytes_of_judge

ClusterFaultKind = Literal["kill", "stop", "part", "kill keeper", "stop keeper"]
_FAULTS: tuple[ClusterFaultKind, ...] = (
    "kill", "stop", "stop", "part", "part", "kill keeper", "kill keeper", "stop keeper", "stop keeper"
)  # fmt: skip

COMPLETION_TOKENS = 50
"""The most tokens of an answer."""
ALLOWED_S = 2000.0
"""Most seconds for a cluster to finish its work after the last fault, several times what the slowest plans need."""
_MOST_SENT = 200
"""Most requests of one source, so that a plan runs in less than a second."""
_LAST_FAULT_S = 60.0
_KINDS = ("requests", "tokens", "concurrency", "bucket", "bucket tokens", "requests tokens concurrency")


@dataclass(frozen=True)
class SharedSource:
    """A server with strict limits, and its latencies: least and most seconds."""

    key: str
    limits: dict[str, Any]
    """As in the configuration."""
    way_s: tuple[float, float]
    """That a request takes to reach it."""
    service_s: tuple[float, float]
    """That it works on a request."""
    connect_s: tuple[float, float] = (0.0, 0.0)
    """From the reservation of a request to its writing."""

    def declared(self) -> Limits:
        """The limits, for the quotas."""
        return Limits.model_validate(self.limits)


@dataclass(frozen=True)
class Work:
    """`count` requests for a worker, every `every_s` seconds from `at_s` on, of `size` bytes each."""

    at_s: float
    worker: int
    source: str
    count: int
    every_s: float = 0.0
    size: int = 0


@dataclass(frozen=True)
class ClusterFault:
    """A fault at `at_s` that lasts `lasts_s` seconds; a killed worker stays dead."""

    at_s: float
    kind: ClusterFaultKind
    worker: int = -1
    lasts_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before play."""

    seed: int
    sources: tuple[SharedSource, ...]
    leaves: tuple[bool, ...]
    """For each worker, whether it closes its engine after its work."""
    work: tuple[Work, ...]
    faults: tuple[ClusterFault, ...] = ()
    message_s: tuple[float, float] = (0.001, 0.01)
    """Least seconds of a message, and the mean of its additional seconds."""
    restarts: bool = True
    """Whether a killed keeper restarts under the same name; otherwise the worker that notices starts one."""

    def config(self) -> dict[str, Any]:
        """The configuration of the workers: one judge for each source."""
        judge = {**JUDGE, "max_tokens": COMPLETION_TOKENS}
        return {
            "sources": {
                source.key: {
                    "kind": "openai",
                    "base_url": "http://simulated.invalid/v1",
                    "model": source.key,
                    "limits": source.limits,
                }
                for source in self.sources
            },
            "judges": {source.key: {**judge, "sources": [source.key]} for source in self.sources},
            "routes": {source.key: source.key for source in self.sources},
            "engine": {
                "seed": self.seed,
                "deadline_s": 36_000.0,
                "max_attempts": 1000,
                "scheduling": {"hedge": False},
            },
        }

    def describe(self) -> str:
        """The plan as text."""
        return pformat(self, width=120)

    def quiet_at(self) -> float:
        """When all faults are over and all work has come."""
        ends = [work.at_s + work.count * work.every_s for work in self.work]
        ends += [fault.at_s + fault.lasts_s for fault in self.faults]
        return max(ends, default=0.0)


def random_plan(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"cluster {seed}")
    leaves = tuple(rng.random() < 0.3 for _ in range(rng.choice((1, 2, 2, 3, 4, 6, 8, 12))))
    sources = tuple(_source(rng, f"s{number}") for number in range(rng.choice((1, 1, 2, 3))))
    return Plan(
        seed,
        sources,
        leaves,
        tuple(work for source in sources for work in _work(rng, source, len(leaves))),
        tuple(sorted(_faults(rng, len(leaves)), key=lambda fault: fault.at_s)),
        message_s=(rng.choice((0.0005, 0.005)), rng.choice((0.001, 0.01, 0.05, 0.3))),
        restarts=rng.random() < 0.5,
    )


def _source(rng: random.Random, key: str) -> SharedSource:
    window_s = rng.choice((60.0, 10.0, 10.0, 3.0, 1.0))
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
        limits["tokens_per_minute"] = rng.choice((2_000, 20_000, 80_000)) * 60 / window_s
    if "concurrency" in kinds:
        limits["concurrency"] = rng.choice((1, 2, rng.randint(1, 8), rng.randint(4, 64)))
    way_s = rng.choice((0.0, 0.01, 0.2))
    # A bucket of one request is paced with a smaller margin, because a larger one would cost speed.
    spread_s = rng.choice((0.0, 0.045)) if "bucket" in kinds else rng.choice((0.0, 0.05, 0.12))
    connect_s = rng.choice((0.0, 0.05, 0.5, 3.0, 12.0))
    service_s = rng.choice((0.02, 0.5, 3.0, 15.0))
    return SharedSource(key, limits, (way_s, way_s + spread_s), (0.3 * service_s, 1.7 * service_s), (0.0, connect_s))


def _work(rng: random.Random, source: SharedSource, workers: int) -> Iterator[Work]:
    """Work for some or all workers: at once, one after the other, or as a stream."""
    limits = source.declared()
    per_minute = min(
        limits.requests_per_minute or math.inf,
        (limits.concurrency or math.inf) * 60 / source.service_s[1],
        math.inf if limits.tokens_per_minute is None else 20.0 * 60 / limits.window_s,
    )
    total = min(_MOST_SENT, max(4, 2 * per_minute)) / rng.choice((1, 2, 4))
    each = max(1, total / workers)
    shape, one = rng.choice(("burst", "burst", "one", "stream", "moving")), rng.randrange(workers)
    for worker in range(workers) if shape != "one" else (one,):
        at_s = worker * rng.uniform(1, 30) if shape == "moving" else rng.uniform(0, 5)
        count = total if shape == "one" else each
        every_s = rng.uniform(0.5, 2) * 60 / each if shape == "stream" else 0.0
        yield Work(at_s, worker, source.key, int(count), every_s, _size(rng, limits))


def _size(rng: random.Random, limits: Limits) -> int:
    least = bytes_of_judge() + 10
    if limits.tokens_per_minute is None:
        return least
    # The first requests reserve one token for each byte.
    most = math.floor(limits.tokens_per_minute * limits.window_s / 60.0) - 2 * COMPLETION_TOKENS
    return max(least, round(rng.choice((0.0, 0.05, 0.2, 0.6, 1.0)) * most))


def _faults(rng: random.Random, workers: int) -> list[ClusterFault]:
    if rng.random() < 0.25:
        return []
    found: list[ClusterFault] = []
    # Simultaneous faults are worse than single ones.
    first_s, last_s = rng.choice(((0.0, _LAST_FAULT_S), (0.0, _LAST_FAULT_S), (8.0, 11.0), (20.0, 30.0)))
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        at_s, lasts_s = rng.uniform(first_s, last_s), rng.choice((0.3, 2.0, 8.0, 15.0, 30.0, 60.0))
        found.append(ClusterFault(at_s, rng.choice(_FAULTS), rng.randrange(workers), lasts_s))
    if rng.random() < 0.15:  # a keeper that dies repeatedly
        start_s, every_s = rng.uniform(0, 40), rng.choice((1.0, 5.0, 12.0, 25.0))
        found += [ClusterFault(start_s + every_s * number, "kill keeper") for number in range(rng.randint(2, 5))]
    return found
