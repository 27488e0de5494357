"""A cluster in virtual time: production engines, each in a process of its own, share limits by a production keeper.

Every process has an event loop of its own, and the cluster runs the loop whose next event comes first. So a process
can be killed, or stopped: it does nothing until it resumes, and then everything at once. The keeper dies and restarts,
or the worker that notices starts another one, and the connection to it may be cut.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..config import Config
from ..engine import RewardEngine
from ..errors import KeeperLost, TransientError
from ..samples import Sample, Scored
from ..samples.spent import Usage
from ..sharing.keeper import Keeper
from ..sharing.messages import Answer, Report
from ..sources.base import Reply, Request, Source
from .clock import VirtualTimeLoop, finish
from .cluster_plan import COMPLETION_TOKENS, ClusterFault, Plan, SharedSource, Work
from .draws import prompt_tokens, verdict_text
from .scenarios import bytes_of_judge
from .strict_limits import Ledger, ledger_of


class ProcessLoop(VirtualTimeLoop):
    """The event loop of one process. It runs only when the cluster says so."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = True
        self.stops = 0
        """How many faults stop it now."""

    def stop_process(self) -> None:
        """Stop the process, as SIGSTOP does, until `resume`: then all that happened meanwhile happens at once."""
        self.stops += 1

    def resume(self) -> None:
        self.stops -= 1

    def due_at(self) -> float:
        """The time of its next event; infinity if there is none, or it cannot run."""
        if self.stops or not self.alive:
            return math.inf
        if self._ready:  # type: ignore[attr-defined]
            return -math.inf
        return self._scheduled[0].when() if self._scheduled else math.inf

    def step(self, now: float) -> None:
        """Run what is due at this time."""
        self._now = max(self._now, now)
        self.call_soon(self.stop)
        self.run_forever()


@dataclass(eq=False)
class _Sent:
    """A request at a server. `answered` gets the tokens of its completion."""

    worker: WorkerProcess
    prompt_tokens: int
    answered: asyncio.Future[int]
    is_open: bool = True


class RecordingServer:
    """One source's server, which counts what comes."""

    def __init__(self, cluster: Cluster, source: SharedSource) -> None:
        limits = source.declared()
        self.source = source
        self.broken: list[str] = []
        self.came_from: list[str] = []
        """The workers whose requests arrived, in order."""
        self._cluster = cluster
        self._counts_at = cluster.rng.choice((0.0, 0.5, 1.0))
        """When a completion counts: at the arrival, halfway, or at the end."""
        rate = limits.requests_per_minute
        # Less than one request in a window is one in a longer window.
        window_s = limits.window_s if rate is None else max(limits.window_s, 60.0 / rate)
        self._requests = ledger_of(rate, window_s, float(limits.burst) if limits.window == "bucket" else None)
        self._tokens = ledger_of(limits.tokens_per_minute, limits.window_s)
        self._concurrency = limits.concurrency or math.inf
        self.in_flight: list[_Sent] = []

    def arrive(self, sent: _Sent) -> None:
        """A request arrives, even if its client has gone meanwhile."""
        cluster, rng = self._cluster, self._cluster.rng
        self.came_from.append(sent.worker.name)
        self._count(self._requests, 1, "requests")
        self._count(self._tokens, sent.prompt_tokens, "tokens")
        if not sent.is_open:
            return
        self.in_flight.append(sent)
        if len(self.in_flight) > self._concurrency:
            self._break(f"{len(self.in_flight)} in flight, {self._concurrency:g} allowed")
        takes_s = rng.uniform(*self.source.service_s)
        completion = math.floor(rng.choice((0.0, 0.5, 1.0, 1.0)) * COMPLETION_TOKENS)
        cluster.world.call_at(cluster.now + self._counts_at * takes_s, self._spend, sent, completion)
        cluster.world.call_at(cluster.now + takes_s, self._end, sent, completion)

    def close(self, sent: _Sent) -> None:
        """The connection of a request closes."""
        sent.is_open = False
        if sent in self.in_flight:
            self.in_flight.remove(sent)

    def _spend(self, sent: _Sent, completion: int) -> None:
        if sent in self.in_flight:
            self._count(self._tokens, completion, "tokens")

    def _end(self, sent: _Sent, completion: int) -> None:
        if sent in self.in_flight:
            self.close(sent)
            back_s = self._cluster.rng.uniform(*self.source.way_s)
            sent.worker.loop.call_at(self._cluster.now + back_s, _set, sent.answered, completion)

    def _count(self, ledger: Ledger, amount: float, what: str) -> None:
        if excess := ledger.excess(amount, self._cluster.now):
            self._break(f"{excess.over:g} {what} more than the {ledger.limit:g} allowed")
        ledger.enter(amount, self._cluster.now)

    def _break(self, what: str) -> None:
        self.broken.append(f"{self.source.key} at {self._cluster.now:.4f}: {what}")


class KeeperProcess:
    """The process of a keeper."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.loop = ProcessLoop()
        self._cluster = cluster
        self._number = number
        self._keeper: Keeper | None = None

    def take_in(self, report: Report, worker: WorkerProcess, answered: asyncio.Future[Answer | None]) -> None:
        """Receive a report, and answer it when an answer is due."""
        self.loop.create_task(self._exchange(report, worker, answered))

    async def _exchange(self, report: Report, worker: WorkerProcess, answered: asyncio.Future[Answer | None]) -> None:
        self._keeper = self._keeper or Keeper(first=self._number == 0)
        answer = await self._keeper.exchange(report)
        self._cluster.send(worker, worker.loop, _set, answered, answer)


class WorkerProcess:
    """The process of a worker, with one engine. It is a `Channel` to the keeper, too."""

    def __init__(self, cluster: Cluster, name: str, *, leaves: bool) -> None:
        self.name = name
        self.loop = ProcessLoop()
        self.unfinished = 0
        self.failed: list[str] = []
        self.reports = 0
        self._cluster = cluster
        self._leaves = leaves
        self._engine: RewardEngine | None = None
        self._keeper: KeeperProcess | None = None
        self._awaited: dict[asyncio.Future[Any], None] = {}

    # Work

    def expect(self, work: Work) -> None:
        """Schedule future work."""
        for number in range(work.count):
            self.unfinished += 1
            self.loop.call_at(work.at_s + number * work.every_s, self._come, work, f"{self.name}-{self.unfinished}")

    def _come(self, work: Work, name: str) -> None:
        if self._engine is None:
            sources = {key: _Source(self._cluster, self, server) for key, server in self._cluster.servers.items()}
            self._engine = RewardEngine(self._cluster.config, sources=sources, channel=self)
        text = "x" * max(1, work.size - bytes_of_judge())
        sample = Sample([{"role": "user", "content": "?"}], text, data_source=work.source, id=name)
        self._cluster.tasks.append(self.loop.create_task(self._score(self._engine, sample)))

    async def _score(self, engine: RewardEngine, sample: Sample) -> None:
        outcome = await engine.score(sample)
        if not isinstance(outcome, Scored):
            self.failed.append(f"{sample.id}: {outcome.describe()}")
        self.unfinished -= 1
        if self._leaves and not self.unfinished:
            await engine.aclose()

    # The keeper

    async def exchange(self, report: Report) -> Answer | None:
        """Send a report to the keeper and wait for the answer."""
        cluster, loop = self._cluster, self.loop
        self.reports += 1
        if self._keeper is None and not report.leaves:
            found: asyncio.Future[KeeperProcess] = loop.create_future()
            cluster.send(self, loop, _set, found, cluster.look_up())
            self._keeper = await found
        keeper = self._keeper
        if keeper is None:
            return None
        answered: asyncio.Future[Answer | None] = loop.create_future()
        # A random name would give another schedule in each run.
        cluster.send(self, keeper.loop, keeper.take_in, report._replace(worker=self.name), self, answered)
        if keeper is not cluster.registered:
            cluster.send(self, loop, self.lost, keeper)
        self._awaited[answered] = None
        try:
            return await answered
        finally:
            del self._awaited[answered]

    async def end_keeper(self) -> None:
        """Kill a keeper that does not answer."""
        if self._keeper is not None:
            self._cluster.kill_keeper(self._keeper)
            self._keeper = None

    def lost(self, keeper: KeeperProcess) -> None:
        """A keeper has died, or has closed its connections."""
        if keeper is self._keeper:
            self._keeper = None
            for answered in self._awaited:
                _set(answered, KeeperLost("it is dead"))

    # Faults

    def kill(self) -> None:
        """End the process, as SIGKILL does, and its connections with it."""
        self.loop.alive = False
        self._disconnect()

    def stop(self) -> None:
        """Stop the process."""
        self.loop.stop_process()
        if self._engine is not None:
            # It cannot cancel its requests in flight when its shares end; the server ends or answers them.
            ends_at = max(upstream.quota.valid_until for upstream in self._engine.upstreams.values())
            if -math.inf < ends_at < math.inf:
                self._cluster.world.call_at(ends_at, self._abandon)

    def _abandon(self) -> None:
        if self.loop.stops and self.loop.alive:
            self._disconnect()

    def _disconnect(self) -> None:
        for server in self._cluster.servers.values():
            for sent in [sent for sent in server.in_flight if sent.worker is self]:
                server.close(sent)
                error = TransientError("the server closed the connection")
                self.loop.call_at(self._cluster.now, _set, sent.answered, error)


class _Source(Source):
    """The client of a worker to one server."""

    model = "simulated"

    def __init__(self, cluster: Cluster, worker: WorkerProcess, server: RecordingServer) -> None:
        self.name = server.source.key
        self._cluster = cluster
        self._worker = worker
        self._server = server

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        cluster, server, rng = self._cluster, self._server, self._cluster.rng
        await asyncio.sleep(rng.uniform(*server.source.connect_s))
        on_sent()
        sent = _Sent(self._worker, prompt_tokens(request.size), asyncio.get_running_loop().create_future())
        cluster.world.call_at(cluster.now + rng.uniform(*server.source.way_s), server.arrive, sent)
        try:
            completion = await sent.answered
        finally:
            server.close(sent)
        usage = Usage(sent.prompt_tokens, completion) if rng.random() < 0.8 else None
        return Reply(text=verdict_text(request), usage=usage, model="simulated")


class Cluster:
    """Plays a plan. Use it as a context manager, which ends all processes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.config = Config.model_validate(plan.config())
        self.rng = random.Random(f"cluster events {plan.seed}")
        self.now = 0.0
        self.world = ProcessLoop()
        """Runs the servers and the faults."""
        self.tasks: list[asyncio.Task[None]] = []
        self.servers = {source.key: RecordingServer(self, source) for source in plan.sources}
        self.keepers = [KeeperProcess(self, 0)]
        self.registered: KeeperProcess | None = self.keepers[0]
        """The keeper that a worker finds, even if it has just died."""
        self.workers = [WorkerProcess(self, f"w{n}", leaves=leaves) for n, leaves in enumerate(plan.leaves)]
        self._parted: Counter[WorkerProcess] = Counter()
        """How many faults cut a worker off from the keeper now."""
        for work in plan.work:
            self.workers[work.worker].expect(work)
        for fault in plan.faults:
            self.world.call_at(fault.at_s, self._start_fault, fault)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for loop in self._loops():
            for timer in loop._scheduled:  # what was still to come would begin new tasks
                timer.cancel()
            finish(loop)

    def run(self, until: float) -> float:
        """Play until all work is done, or until `until`; return the end."""
        while self.unfinished():
            loop = min(self._loops(), key=ProcessLoop.due_at)
            due_at = loop.due_at()
            if due_at > until:
                self.now = until
                break
            self.now = max(self.now, due_at)
            loop.step(self.now)
        return self.now

    def unfinished(self) -> int:
        """Requests of living workers that are unanswered or still to come."""
        return sum(worker.unfinished for worker in self.workers if worker.loop.alive)

    def _loops(self) -> list[ProcessLoop]:
        keepers = (keeper.loop for keeper in self.keepers)
        return [self.world, *keepers, *(worker.loop for worker in self.workers)]

    def send(self, worker: WorkerProcess, to: ProcessLoop, what: Callable[..., Any], *arguments: Any) -> None:
        """Send a message to or from a worker: it arrives later, or never where the connection is cut."""
        least_s, mean_s = self.plan.message_s
        if not self._parted[worker]:
            to.call_at(self.now + least_s + self.rng.expovariate(1 / mean_s), what, *arguments)

    # Keepers

    def look_up(self) -> KeeperProcess:
        """The registered keeper. If there is none, a new one starts."""
        if self.registered is None:
            self.registered = KeeperProcess(self, len(self.keepers))
            self.keepers.append(self.registered)
        return self.registered

    def kill_keeper(self, keeper: KeeperProcess) -> None:
        """Kill a keeper; its death is noticed a little later."""
        if keeper.loop.alive:
            keeper.loop.alive = False
            self.world.call_at(self.now + self.rng.choice((0.01, 0.5, 3.0)), self._notice, keeper)

    def _notice(self, keeper: KeeperProcess) -> None:
        if keeper is self.registered:
            self.registered = None
            if self.plan.restarts:
                self.look_up()
        for worker in self.workers:
            self.send(worker, worker.loop, worker.lost, keeper)

    # Faults

    def _start_fault(self, fault: ClusterFault) -> None:
        keeper, worker = self.keepers[-1], self.workers[fault.worker]
        begins_and_ends: dict[str, tuple[Callable[[], object], Callable[[], object] | None]] = {
            "kill": (worker.kill, None),
            "kill keeper": (partial(self.kill_keeper, keeper), None),
            "part": (partial(self._parted.update, [worker]), partial(self._parted.subtract, [worker])),
            "stop": (worker.stop, worker.loop.resume),
            "stop keeper": (keeper.loop.stop_process, keeper.loop.resume),
        }
        begin, end = begins_and_ends[fault.kind]
        begin()
        if end is not None:
            self.world.call_at(self.now + fault.lasts_s, end)


def _set(future: asyncio.Future[Any], value: Any) -> None:
    """Set the result of a future, or its exception."""
    if not future.done():
        (future.set_exception if isinstance(value, Exception) else future.set_result)(value)
