"""A cluster in virtual time, which runs the real protocol of shared limits.

Nodes have their own clocks, the network loses, duplicates and reorders messages, and the keeper dies and restarts, or
the worker that notices starts another one. Only servers use the true time. All actions of a node are events of the
cluster, so a stopped process does nothing until it resumes, and then everything at once, in any order.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from ..sharing.messages import Report
from .cluster_nodes import KeeperNode, Node
from .cluster_plan import ClusterFault, Plan
from .cluster_server import RecordingServer
from .cluster_worker import SimulatedWorker


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
