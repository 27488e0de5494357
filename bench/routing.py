"""What routing does for the prefix caches of judge replicas, and for the time of a step, in simulation.

Groups of answers to one question are judged by replicas with a prefix cache each. The policies of this package are the
real code (`qreward_plugins/sources/routing.py`); `naive` and `tree` are our own writing of verl's NaiveRouter (fewest
requests, the first of equals) and of the cache-aware policy of SGLang's router (longest known prefix while the load is
balanced, else fewest requests; thresholds 0.5, 32 and 1.1, the defaults of its library, not of its command line).

A replica works on `--slots` requests at once and keeps the others in a queue. A request takes the prefill of its
uncached tokens, one request after the other, and then its decoding. Prefill does not slow the decoding of others, as
the chunked prefill of vLLM does, so a hit saves less time here than there. The cache holds blocks of 16 tokens and
drops the least recently used. `alone` is one replica with the caches and the speed of all: what the hit rate could be.
`bound` is the shortest time in which the work could be done: every prefix computed once, and all slots used all the
time.

    python bench/routing.py [--replicas N ...] [--load NAME ...] [--policy NAME ...] [--seed S ...] [--json FILE]
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import common
from rich.console import Console
from rich.table import Table

from qreward_plugins.config.source_models import RoutingStrategy
from qreward_plugins.sources.replicas import Lease, Replicas, RoutingHints

BLOCK = 16


@dataclass(frozen=True)
class Load:
    """What is judged, and how it is sent. `window` is the most requests under way for each replica. Each of the
    n `workers` is a process that routes by itself. By `split` it gets every n-th answer (`turns`), one n-th of the
    batch in a row (`rows`), or answers that are drawn (`drawn`). `spread` is the sigma of the lengths.
    """

    questions: int = 256
    answers: int = 8
    instructions: int = 1500
    question: int = 600
    response: int = 400
    verdict: int = 100
    spread: float = 0.4
    shuffled: bool = False
    window: int = 32
    workers: int = 1
    split: Literal["turns", "rows", "drawn"] = "turns"


@dataclass(frozen=True)
class Server:
    """A replica. `prefill` is tokens per second, `token_s` the seconds for each decoded token, `cache` tokens."""

    slots: int = 16
    prefill: float = 20_000.0
    token_s: float = 0.02
    cache: int = 200_000


LOADS = {
    "groups": Load(),
    "shuffled": Load(shuffled=True),
    "all_at_once": Load(window=10**6),
    "8_processes": Load(workers=8),
    "8_rows": Load(workers=8, split="rows"),
    "8_drawn": Load(workers=8, split="drawn", shuffled=True),
    "gateways": Load(instructions=300, question=150, window=8),
    "no_question": Load(question=0),
}
SERVERS = {"gateways": Server(slots=4, prefill=1e9, cache=0)}
"""Other replicas than the usual one: hosted gateways show no cache, and their time is that of decoding."""


@dataclass(frozen=True)
class Job:
    """One answer to judge. `common` and `own` are tokens; `worker` is the process that sends it."""

    group: int
    common: int
    own: int
    verdict: int
    worker: int

    @property
    def prompt(self) -> int:
        return self.common + self.own


class Cache:
    """Blocks of a prefix cache, least recently used first. A block is known by its group and its number; those of the
    instructions belong to no group.
    """

    def __init__(self, tokens: int, instructions: int) -> None:
        self._most = tokens // BLOCK
        self._instructions = instructions // BLOCK
        self._blocks: OrderedDict[tuple[int, int], None] = OrderedDict()

    def read(self, job: Job) -> int:
        """Return the tokens of a prompt that are cached, and keep all of it."""
        hit, missed = 0, False
        for number in range(job.common // BLOCK):
            block = (-1 if number < self._instructions else job.group, number)
            missed = missed or block not in self._blocks
            hit += 0 if missed else BLOCK
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        for number in range(job.own // BLOCK):
            self._blocks[(id(job), number)] = None
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return hit


class Simulated:
    """One replica."""

    def __init__(self, server: Server, instructions: int) -> None:
        self._server = server
        self._cache = Cache(server.cache, instructions)
        self._queue: deque[tuple[int, Job]] = deque()
        self._busy = 0
        self._prefilled_at = 0.0
        self.computed = self.hits = 0

    def take(self, number: int, job: Job, now: float) -> list[tuple[float, int]]:
        self._queue.append((number, job))
        return self._start(now)

    def end(self, now: float) -> list[tuple[float, int]]:
        self._busy -= 1
        return self._start(now)

    def _start(self, now: float) -> list[tuple[float, int]]:
        ends = []
        while self._queue and self._busy < self._server.slots:
            number, job = self._queue.popleft()
            self._busy += 1
            hit = self._cache.read(job)
            self.hits += hit
            self.computed += job.prompt - hit
            self._prefilled_at = max(now, self._prefilled_at) + (job.prompt - hit) / self._server.prefill
            ends.append((self._prefilled_at + job.verdict * self._server.token_s, number))
        return ends


Release = Callable[[], None]


class Ours:
    """A policy of this package: each worker has replicas of its own, as each process has."""

    def __init__(self, *strategies: RoutingStrategy) -> None:
        self._routing = strategies
        self._by_worker: dict[int, Replicas] = {}

    def choose(self, job: Job, now: float, count: int) -> tuple[int, Release]:
        replicas = self._by_worker.get(job.worker)
        if replicas is None:
            replicas = self._by_worker[job.worker] = Replicas(map(str, range(count)), self._routing)
        lease: Lease = replicas.acquire(
            now, RoutingHints(job.prompt, job.verdict, _hashed(job.group) if job.common else None)
        )
        return int(lease.replica.base_url), lease.release


class Naive:
    """verl's NaiveRouter: fewest requests under way, the first of equals."""

    def __init__(self) -> None:
        self._loads: dict[int, list[int]] = {}

    def choose(self, job: Job, now: float, count: int) -> tuple[int, Release]:
        loads = self._loads.setdefault(job.worker, [0] * count)
        at = loads.index(min(loads))
        return at, self._sent(loads, at)

    def _sent(self, loads: list[int], at: int) -> Release:
        loads[at] += 1

        def release() -> None:
            loads[at] -= 1

        return release


class Tree(Naive):
    """SGLang's cache-aware policy. Of the tree only the two depths matter here: the instructions, and a question."""

    def __init__(self, instructions: int) -> None:
        super().__init__()
        self._instructions = instructions
        self._groups: dict[int, dict[int, int]] = {}
        self._sizes: dict[int, list[int]] = {}

    def choose(self, job: Job, now: float, count: int) -> tuple[int, Release]:
        loads = self._loads.setdefault(job.worker, [0] * count)
        sizes = self._sizes.setdefault(job.worker, [0] * count)
        groups = self._groups.setdefault(job.worker, {})
        most, least = max(loads), min(loads)
        if most - least > 32 and most > 1.1 * least:
            at = loads.index(least)
        elif job.group in groups:
            at = groups[job.group]
        elif groups and self._instructions / job.prompt > 0.5:
            # Every replica that has the instructions matches as well; the tree names the one that had them last.
            at = next(reversed(groups.values()))
        else:
            at = sizes.index(min(sizes))
        groups.pop(job.group, None)
        groups[job.group] = at
        sizes[at] += job.prompt
        return at, self._sent(loads, at)


POLICIES: dict[str, Callable[[Load], Ours | Naive]] = {
    "round_robin": lambda load: Ours("round_robin"),
    "least_requests": lambda load: Ours("least_requests"),
    "least_pending_tokens": lambda load: Ours("least_pending_tokens"),
    "prefix_aware": lambda load: Ours("prefix_aware", "least_pending_tokens"),
    "naive (verl)": lambda load: Naive(),
    "tree (sglang)": lambda load: Tree(load.instructions),
}


@dataclass(frozen=True)
class Result:
    """What came of one run. Times are seconds; `hit_share` is the hit rate as a share of that of one replica alone."""

    load: str
    replicas: int
    policy: str
    makespan_s: float
    bound_s: float
    hit_rate: float
    hit_share: float
    computed: int


def jobs_of(load: Load, seed: int) -> list[Job]:
    rng = random.Random(seed)

    def length(mean: float) -> int:
        return round(mean * math.exp(rng.gauss(-(load.spread**2) / 2, load.spread))) if mean else 0

    jobs = []
    for group in range(load.questions):
        common = load.instructions + length(load.question)
        for _ in range(load.answers):
            jobs.append(Job(group, common, length(load.response), max(1, length(load.verdict)), 0))
    if load.question == 0:
        jobs = [replace(job, group=0) for job in jobs]
    if load.shuffled:
        rng.shuffle(jobs)
    workers = {
        "turns": lambda number: number % load.workers,
        "rows": lambda number: number * load.workers // len(jobs),
        "drawn": lambda number: rng.randrange(load.workers),
    }[load.split]
    return [replace(job, worker=workers(number)) for number, job in enumerate(jobs)]


def run(load: Load, server: Server, count: int, policy: Ours | Naive, jobs: Sequence[Job]) -> tuple[float, int, int]:
    """Play one step. Return its seconds, the tokens that were computed and those that were cached."""
    replicas = [Simulated(server, load.instructions) for _ in range(count)]
    waiting: list[deque[int]] = [deque() for _ in range(load.workers)]
    for number, job in enumerate(jobs):
        waiting[job.worker].append(number)
    room = [max(1, load.window * count // load.workers)] * load.workers
    ends: list[tuple[float, int]] = []
    placed: dict[int, tuple[int, Release]] = {}

    def send(worker: int, now: float) -> None:
        while waiting[worker] and room[worker]:
            room[worker] -= 1
            number = waiting[worker].popleft()
            at, release = policy.choose(jobs[number], now, count)
            placed[number] = (at, release)
            for end in replicas[at].take(number, jobs[number], now):
                heapq.heappush(ends, end)

    now = 0.0
    for worker in range(load.workers):
        send(worker, now)
    while ends:
        now, number = heapq.heappop(ends)
        at, release = placed.pop(number)
        release()
        for end in replicas[at].end(now):
            heapq.heappush(ends, end)
        worker = jobs[number].worker
        room[worker] += 1
        send(worker, now)
    return now, sum(one.computed for one in replicas), sum(one.hits for one in replicas)


def bound_of(load: Load, server: Server, count: int, jobs: Sequence[Job]) -> float:
    """Return the shortest time in which the work could be done, in seconds."""
    shared = {job.group: job.common - load.instructions for job in jobs}
    unique = load.instructions + sum(shared.values()) + sum(job.own for job in jobs)
    prefill = (sum(job.prompt for job in jobs) if not server.cache else unique) / server.prefill
    decode = sum(job.verdict for job in jobs) * server.token_s
    longest = max(job.verdict * server.token_s for job in jobs)
    return max(prefill / count, (decode + prefill) / (count * server.slots), longest)


def measure(name: str, count: int, policies: Sequence[str], seed: int) -> list[Result]:
    load, server = LOADS[name], SERVERS.get(name, Server())
    jobs = jobs_of(load, seed)
    prompts = sum(job.prompt for job in jobs)
    alone = Server(server.slots * count, server.prefill * count, server.token_s, server.cache * count)
    one_worker = [replace(job, worker=0) for job in jobs]
    _, _, best = run(replace(load, window=load.window * count, workers=1), alone, 1, Naive(), one_worker)
    bound_s = bound_of(load, server, count, jobs)
    found = []
    for policy in policies:
        makespan_s, computed, hits = run(load, server, count, POLICIES[policy](load), jobs)
        share = hits / best if best else math.nan
        found.append(Result(name, count, policy, makespan_s, bound_s, hits / prompts, share, computed))
    return found


def mean(results: Sequence[Result]) -> Result:
    """The means over the runs of one policy with several seeds."""
    numbers = {
        key: fmean(getattr(one, key) for one in results) for key in ("makespan_s", "bound_s", "hit_rate", "hit_share")
    }
    return replace(results[0], **numbers, computed=round(fmean(one.computed for one in results)))


def table(results: Sequence[Result]) -> Table:
    shown = common.table(
        "load", "replicas", "policy", "makespan", "of the bound", "prefix hits", "of one alone", "tokens computed",
        title="Routing between replicas (simulated)",
    )  # fmt: skip
    for one in results:
        shown.add_row(
            one.load,
            str(one.replicas),
            one.policy,
            f"{one.makespan_s:.1f} s",
            f"{one.makespan_s / one.bound_s:.2f}",
            f"{one.hit_rate:.3f}",
            "-" if math.isnan(one.hit_share) else f"{one.hit_share:.3f}",
            f"{one.computed:,}",
        )
    return shown


def _hashed(group: int) -> int:
    return random.Random(group).getrandbits(64)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64], metavar="N")
    parser.add_argument("--load", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="several seeds: means over them")
    given = parser.parse_args(arguments)
    results = [
        mean(list(seeds))
        for name in given.load
        for count in given.replicas
        for seeds in zip(*(measure(name, count, given.policy, seed) for seed in given.seed), strict=True)
    ]
    Console(width=120).print(table(results))
    common.write(given.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
