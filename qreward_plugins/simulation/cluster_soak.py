"""The soak of the sharing protocol: plays random clusters with faults, and checks two promises.

No fault breaks a limit. After the last fault, all waiting requests are sent within a time that follows from the limits,
so no worker waits for ever and there is no deadlock over shares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b

from ..sharing.keeper import MARGIN_S, TTL_S
from .cluster import Cluster
from .cluster_plan import Plan, SharedSource, random_plan
from .promises import Broken
from .soak import Finding, crashed

SILENCE_S = 40.0
"""Seconds after which all workers have noticed a lost keeper, and there is another."""
SLACK = 2.5
"""The time allowed to all processes, as a multiple of the best time of one process."""
_FINGERPRINTS = 2**64


@dataclass
class ClusterTally:
    """The sums over all clusters."""

    trials: int = 0
    requests: int = 0
    """Requests that arrived at servers."""
    reports: int = 0
    keepers: int = 0
    virtual_s: float = 0.0
    slowest: tuple[float, int] = (0.0, -1)
    """The largest used share of the allowed time after the last fault, and its seed."""
    fingerprint: int = 0

    def add(self, other: ClusterTally) -> None:
        """Add another tally to this one."""
        self.trials += other.trials
        self.requests += other.requests
        self.reports += other.reports
        self.keepers += other.keepers
        self.virtual_s += other.virtual_s
        self.slowest = max(self.slowest, other.slowest)
        self.fingerprint = (self.fingerprint + other.fingerprint) % _FINGERPRINTS


@dataclass(frozen=True)
class ClusterFinding(Finding):
    """A seed whose cluster broke a promise."""

    def describe(self) -> str:
        """The broken promises, and how to replay the seed."""
        lines = [f"cluster {self.seed} broke {broken}" for broken in self.broken]
        return "\n".join([*lines, f"  replay: python -m qreward_plugins.simulation --cluster --seed {self.seed}"])


@dataclass(frozen=True)
class ClusterSoaked:
    """The results of a range of seeds."""

    tally: ClusterTally
    findings: tuple[ClusterFinding, ...]

    def describe(self, *, most: int = 3) -> str:
        """The first findings with their plans, as text."""
        return "\n\n".join(f"{one.describe()}\n{random_plan(one.seed).describe()}" for one in self.findings[:most])


def time_allowed_s(plan: Plan) -> float:
    """Most seconds for a cluster to finish its work after the last fault."""
    empty_after_s = [_empty_after_s(source) for source in plan.sources]
    # A silent worker's share counts as spent for a window; a new keeper waits longer than that.
    recovery_s = SILENCE_S + 2 * TTL_S + MARGIN_S + 2 * max(empty_after_s)
    messages_s = 20 * sum(plan.message_s) / (1 - plan.lost) ** 2
    return recovery_s + messages_s + SLACK * max(_work_s(plan, source) for source in plan.sources)


def check_cluster(seed: int) -> tuple[Cluster, ClusterTally, list[Broken]]:
    """Play the plan of a seed and check the promises."""
    plan = random_plan(seed)
    cluster = Cluster(plan)
    quiet_at, allowed_s = plan.quiet_at(), time_allowed_s(plan)
    done_at = cluster.run(quiet_at + allowed_s)
    broken = [Broken("P3", problem) for server in cluster.servers.values() for problem in server.broken[:3]]
    if unfinished := cluster.unfinished():
        broken.append(Broken("liveness", f"{unfinished} requests wait {allowed_s:.0f} s after the last fault"))
    seen = [
        f"{worker.name} {worker.reports} {worker.unfinished} {worker.waited_s}" for worker in cluster.workers.values()
    ]
    seen += [f"{server.came_from}" for server in cluster.servers.values()]
    tally = ClusterTally(
        trials=1,
        requests=sum(server.came for server in cluster.servers.values()),
        reports=sum(worker.reports for worker in cluster.workers.values()),
        keepers=len(cluster.keepers),
        virtual_s=done_at,
        slowest=(max(0.0, done_at - quiet_at) / allowed_s, seed),
        fingerprint=int.from_bytes(blake2b(f"{seed} {done_at} {seen}".encode(), digest_size=8).digest(), "little"),
    )
    return cluster, tally, broken


def soak_clusters(first: int, last: int) -> ClusterSoaked:
    """Play the plans of the seeds from `first` to before `last` in this process."""
    tally, findings = ClusterTally(), []
    for seed in range(first, last):
        try:
            _, one, broken = check_cluster(seed)
        except Exception as error:
            findings.append(ClusterFinding(seed, (crashed("the cluster itself", error),)))
            continue
        tally.add(one)
        if broken:
            findings.append(ClusterFinding(seed, tuple(broken)))
    return ClusterSoaked(tally, tuple(findings))


def _empty_after_s(source: SharedSource) -> float:
    """Seconds after which all spent requests and tokens have left the windows."""
    limits = source.declared()
    window_s = limits.window_s
    if limits.requests_per_minute is not None:
        window_s = max(window_s, 60.0 / limits.requests_per_minute)
        if limits.window == "bucket":
            window_s = max(window_s, limits.burst * 60.0 / limits.requests_per_minute)
    return window_s + source.connect_s[1] + source.service_s[1] + 2 * source.way_s[1]


def _work_s(plan: Plan, source: SharedSource) -> float:
    """Seconds that one process needs for a source's work at most."""
    limits, takes_s = source.declared(), source.connect_s[1] + source.service_s[1] + 2 * source.way_s[1]
    work = [one for one in plan.work if one.source == source.key]
    count = sum(one.count for one in work)
    needs = [takes_s]
    if limits.requests_per_minute is not None:
        per_window = math.floor(limits.requests_per_minute * limits.window_s / 60.0 + 1e-9)
        if limits.window == "bucket":
            # A request counts when it is written, so no more than the bucket holds may wait for connections.
            connecting_s = source.connect_s[1] / max(1, limits.burst - 1)
            needs.append(count * (60.0 / limits.requests_per_minute + 0.15 + connecting_s))
        elif per_window < 1:
            needs.append(count * (60.0 / limits.requests_per_minute + source.connect_s[1] + 1.0))
        else:
            needs.append(math.ceil(count / per_window) * (limits.window_s + source.connect_s[1] + 1.0))
    if limits.concurrency is not None:
        needs.append(math.ceil(count / limits.concurrency) * (takes_s + 1.0))
    if limits.tokens_per_minute is not None:
        whole = limits.tokens_per_minute * limits.window_s / 60.0
        # Tokens are reserved while a request is in flight, and spent for a window after that.
        needs.append(
            sum(
                one.count / max(1, math.floor(whole / max(1.0, one.prompt_tokens + one.completion_tokens)))
                for one in work
            )
            * (limits.window_s + takes_s + 1.0)
        )
    return sum(needs)
