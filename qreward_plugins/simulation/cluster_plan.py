"""The plan of a simulated cluster: the limits and work of its workers, and all faults.

A plan is drawn from a seed and can be read before it is played. Random events during play (how long a message takes,
whether it is lost) come from the same seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..config import Limits
from .scenarios import JUDGE, bytes_of_judge

ClusterFaultKind = Literal["kill", "stop", "part", "loss", "kill keeper", "stop keeper", "slow keeper"]
_FAULTS: tuple[ClusterFaultKind, ...] = (
    "kill", "stop", "stop", "part", "part", "loss", "kill keeper", "kill keeper", "stop keeper", "slow keeper"
)  # fmt: skip

COMPLETION_TOKENS = 50
"""The most tokens of an answer."""
SLACK = 2.5
"""The time allowed to all processes, as a multiple of the best time of one process."""
_MOST_SENT = 200
"""Most requests of one source, so that a plan runs in less than a second."""
_LAST_FAULT_S = 60.0
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

    @property
    def longest_s(self) -> float:
        """The longest time of a request."""
        return self.connect_s[1] + self.service_s[1] + 2 * self.way_s[1]

    def empty_after_s(self) -> float:
        """Seconds after which all spent requests and tokens have left the windows."""
        limits = self.declared()
        window_s = limits.window_s
        if limits.requests_per_minute is not None:
            burst = limits.burst if limits.window == "bucket" else 1
            window_s = max(window_s, burst * 60.0 / limits.requests_per_minute)
        return window_s + self.longest_s


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
class Worker:
    """A worker process: whether it closes its engine after its work, and its clock."""

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
        lines = [
            f"cluster {self.seed}: {len(self.workers)} workers, messages {self.message_s}, lost {self.lost:.0%},"
            f" doubled {self.doubled:.0%},"
            f" keeper {'restarts' if self.restarts else 'is started by a worker that notices'}"
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
        return max(ends, default=0.0)

    def allowed_s(self, recovery_s: float) -> float:
        """Most seconds to finish the work after the last fault, if noticing a lost keeper and counting what it gave
        takes `recovery_s`.
        """
        # A silent worker's share counts as spent for a window; a new keeper waits longer than that.
        recovery_s += 2 * max(source.empty_after_s() for source in self.sources)
        messages_s = 20 * sum(self.message_s) / (1 - self.lost) ** 2
        return recovery_s + messages_s + SLACK * max(self._work_s(source) for source in self.sources)

    def _work_s(self, source: SharedSource) -> float:
        """Seconds that one process needs for a source's work at most."""
        limits, takes_s = source.declared(), source.longest_s
        work = [one for one in self.work if one.source == source.key]
        count = sum(one.count for one in work)
        needs = [takes_s]
        if limits.requests_per_minute is not None:
            interval_s = 60.0 / limits.requests_per_minute
            per_window = math.floor(limits.requests_per_minute * limits.window_s / 60.0 + 1e-9)
            if limits.window == "bucket":
                # A request counts when it is written, so no more than the bucket holds may wait for connections.
                needs.append(count * (interval_s + 0.15 + source.connect_s[1] / max(1, limits.burst - 1)))
            elif per_window < 1:
                needs.append(count * (interval_s + source.connect_s[1] + 1.0))
            else:
                needs.append(math.ceil(count / per_window) * (limits.window_s + source.connect_s[1] + 1.0))
        if limits.concurrency is not None:
            needs.append(math.ceil(count / limits.concurrency) * (takes_s + 1.0))
        if limits.tokens_per_minute is not None:
            whole = limits.tokens_per_minute * limits.window_s / 60.0
            # Tokens are reserved while a request is in flight, one for each byte at first, and spent for a window.
            windows = sum(one.count / max(1, math.floor(whole / (one.size + COMPLETION_TOKENS))) for one in work)
            needs.append(windows * (limits.window_s + takes_s + 1.0))
        return sum(needs)


def random_plan(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"cluster {seed}")
    workers = tuple(Worker(rng.random() < 0.3, _clock(rng)) for _ in range(rng.choice((1, 2, 2, 3, 4, 6, 8, 12))))
    sources = tuple(_source(rng, f"s{number}") for number in range(rng.choice((1, 1, 2, 3))))
    return Plan(
        seed,
        sources,
        workers,
        tuple(work for source in sources for work in _work(rng, source, len(workers))),
        tuple(sorted(_faults(rng, len(workers)), key=lambda fault: fault.at_s)),
        message_s=(rng.choice((0.0005, 0.005)), rng.choice((0.001, 0.01, 0.05, 0.3))),
        lost=rng.choice((0.0, 0.0, 0.02, 0.05)),
        doubled=rng.choice((0.0, 0.0, 0.2)),
        restarts=rng.random() < 0.5,
        keeper_clock=_clock(rng),
    )


def _clock(rng: random.Random) -> tuple[float, float]:
    return rng.uniform(0, 1e6), 1.0 + rng.choice((0.0, 1e-4, -1e-4, rng.uniform(-1e-4, 1e-4)))


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
    """Work for some or all workers: at once, in waves, one after the other, as a stream, or half as much for each."""
    limits = source.declared()
    per_minute = min(
        limits.requests_per_minute or math.inf,
        (limits.concurrency or math.inf) * 60 / source.service_s[1],
        math.inf if limits.tokens_per_minute is None else 20.0 * 60 / limits.window_s,
    )
    total = min(_MOST_SENT, max(4, 2 * per_minute)) / rng.choice((1, 2, 4))
    each = max(1, total / workers)
    shape = rng.choice(("burst", "burst", "one", "stream", "waves", "moving", "skewed"))
    one = rng.randrange(workers)
    for worker in range(workers):
        if shape == "one" and worker != one:
            continue
        for wave in range(3 if shape == "waves" else 1):
            at_s, count, every_s = rng.uniform(0, 5), each, 0.0
            if shape == "one":
                count = total
            elif shape == "stream":
                every_s = rng.uniform(0.5, 2) * 60 / each
            elif shape == "waves":
                at_s, count = wave * rng.uniform(10, 40), max(1, each / 3)
            elif shape == "moving":
                at_s = worker * rng.uniform(1, 30)
            elif shape == "skewed":
                count = max(1, total / 2 ** (worker + 1))
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
