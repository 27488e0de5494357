"""A cluster in virtual time, which runs the real protocol of shared limits.

Nodes have their own clocks, the network loses, duplicates and reorders messages, and the keeper dies and restarts, or
the worker that notices starts another one. Only servers use the true time. All actions of a node are events of the
cluster, so a stopped process does nothing until it resumes, and then everything at once, in any order.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..sharing.keeper import MARGIN_S, TTL_S
from ..sharing.messages import Report
from .cluster_nodes import KeeperNode, Node, RecordingServer
from .cluster_plan import ClusterFault, Plan, SharedSource, random_plan
from .cluster_worker import SimulatedWorker
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


class Cluster:
    """Plays a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(f"cluster events {plan.seed}")
        self.now = 0.0
        self.servers = {source.key: RecordingServer(source, self.rng) for source in plan.sources}
        self.workers: dict[str, SimulatedWorker] = {}
        self.keepers: list[KeeperNode] = [KeeperNode(self, 0)]
        self.registered = True
        """Whether the keeper's name is registered, even for a dead keeper."""
        self.parted: dict[str, int] = {}
        self._lossy = 0
        self._counter = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        for number, worker in enumerate(plan.workers):
            self.workers[f"w{number}"] = SimulatedWorker(self, f"w{number}", worker, plan.sources)
        for work in plan.work:
            self.workers[f"w{work.worker}"].expect(work)
        for fault in plan.faults:
            self.at(fault.at_s, self._start_fault, fault)

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call at a true time."""
        heapq.heappush(self._events, (max(when, self.now), next(self._counter), what, arguments))

    def run(self, until: float) -> float:
        """Play until all work is done, or until `until`; return the end."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, what, arguments = heapq.heappop(events)
            what(*arguments)
            if not self.unfinished():
                return self.now
        self.now = until
        return until

    def unfinished(self) -> int:
        """Requests of living workers that are unanswered or still to come."""
        return sum(worker.unfinished for worker in self.workers.values() if worker.alive)

    # Messages

    def send(self, worker: str, slow_s: float, what: Callable[..., None], *arguments: Any) -> None:
        """Send a message to or from a worker: it arrives later, twice, or never."""
        least_s, mean_s = self.plan.message_s
        node: Node = what.__self__  # type: ignore[attr-defined]
        lost = 0.7 if self._lossy else self.plan.lost
        for _ in range(2 if self.rng.random() < self.plan.doubled else 1):
            if self.parted.get(worker) or self.rng.random() < lost:
                continue
            delay_s = least_s + self.rng.expovariate(1 / mean_s) + slow_s
            self.at(self.now + delay_s, node.happen, what, *arguments)

    # The name of the keeper

    def look_up(self, worker: SimulatedWorker) -> None:
        """A worker looks the keeper up. If none is registered, a new one starts."""
        if not self.registered:
            self._start_keeper()
        self.send(worker.name, 0.0, worker.found, len(self.keepers) - 1)

    def report(self, worker: SimulatedWorker, handle: int, report: Report) -> None:
        """Send a worker's report to the keeper of a handle."""
        keeper = self.keepers[handle]
        self.send(worker.name, 0.0, keeper.take_in, report)
        if not keeper.alive and not (self.registered and handle == len(self.keepers) - 1):
            self.send(worker.name, 0.0, worker.lost, handle)

    def end_keeper(self, handle: int) -> None:
        """Kill a keeper that does not answer."""
        self._kill_keeper(self.keepers[handle])

    def _start_keeper(self) -> None:
        self.registered = True
        self.keepers.append(KeeperNode(self, len(self.keepers)))

    def _kill_keeper(self, keeper: KeeperNode) -> None:
        if keeper.alive:
            keeper.alive = False
            self.at(self.now + self.rng.choice((0.01, 0.5, 3.0)), self._notice, keeper)

    def _notice(self, keeper: KeeperNode) -> None:
        if self.plan.restarts:
            self._start_keeper()
        elif keeper.number == len(self.keepers) - 1:
            self.registered = False
        self._close(keeper)

    def _close(self, keeper: KeeperNode) -> None:
        for worker in self.workers.values():
            if worker.handle == keeper.number:
                self.send(worker.name, 0.0, worker.lost, keeper.number)

    # Faults

    def _start_fault(self, fault: ClusterFault) -> None:
        end = self.now + fault.lasts_s
        keeper = self.keepers[-1]
        if fault.kind == "kill keeper":
            self._kill_keeper(keeper)
        elif fault.kind == "stop keeper":
            keeper.stop()
            self.at(end, keeper.resume)
        elif fault.kind == "slow keeper":
            keeper.slow_s += 4.0
            self.at(end, self._quicken, keeper)
        elif fault.kind == "loss":
            self._lossy += 1
            self.at(end, self._calm)
        else:
            worker = self.workers[f"w{fault.worker}"]
            if fault.kind == "kill":
                worker.kill()
            elif fault.kind == "stop":
                worker.stop()
                self.at(end, worker.resume)
            else:
                self.parted[worker.name] = self.parted.get(worker.name, 0) + 1
                self.at(end, self._join, worker.name)

    def _quicken(self, keeper: KeeperNode) -> None:
        keeper.slow_s -= 4.0

    def _calm(self) -> None:
        self._lossy -= 1

    def _join(self, worker: str) -> None:
        self.parted[worker] -= 1
