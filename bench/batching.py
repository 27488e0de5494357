"""What it brings to send several calls in one request: samples a second, and how long a sample waits.

Three policies score the same samples at the same server, in one run:

    ours       `batch` of the source: calls that wait go together as soon as the source can take a request
    single     the same engine without `batch`: one request a sample
    timer      a queue that is flushed every second, in requests of up to the same size

The simulated server takes a + b * n seconds for a request of n samples, whatever else it does, and serves `concurrency`
requests at once; all policies know that number. Time is virtual.

    python bench/batching.py [--samples N] [--json FILE]
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import common
from rich.console import Console

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.config import Batch
from qreward_plugins.observers.batch_report import percentile
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply, Request, Source

SAMPLES = 4096
MAX_SIZE = 64
FLUSH_S = 1.0
Score = Callable[[Sample], Awaitable[None]]


@dataclass(frozen=True)
class Setting:
    """A server, and when the samples come. `over_s`: they come evenly over this time; 0: all at once."""

    name: str
    a_s: float
    b_s: float
    concurrency: int
    over_s: float = 0.0
    samples: int | None = None


SETTINGS = (
    Setting("all at once", 0.02, 0.002, 4),
    Setting("all at once, one request at a time", 0.02, 0.002, 1),
    Setting("streamed over 10 s", 0.02, 0.002, 4, over_s=10.0),
    Setting("streamed over 10 s, one request at a time", 0.02, 0.002, 1, over_s=10.0),
    Setting("a tenth of them over 10 s (little load)", 0.02, 0.002, 4, over_s=10.0, samples=SAMPLES // 10),
    Setting("a costs nothing", 0.0, 0.002, 4),
)


@dataclass(frozen=True)
class Measured:
    """One policy in one setting. `wait_*` are seconds from the submission of a sample to its score."""

    setting: str
    policy: str
    samples_per_s: float
    wait_p50_s: float
    wait_p99_s: float
    requests: int


class SimulatedModel(Source):
    """A reward model that takes a + b * n seconds for a request of n samples."""

    name, model = "rm", "simulated"

    def __init__(self, setting: Setting, *, batch: Batch | None) -> None:
        self._setting = setting
        self.batch = batch
        self.requests = 0

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        return (await self.send_batch([request], on_sent=on_sent))[0]

    async def send_batch(self, requests: Sequence[Request], *, on_sent: Callable[[], None]) -> list[Reply]:
        on_sent()
        self.requests += 1
        await asyncio.sleep(self._setting.a_s + self._setting.b_s * len(requests))
        return [Reply(value={"0": 0.5}) for _ in requests]


class Timer:
    """Flushes a queue every `FLUSH_S`, in requests of up to `MAX_SIZE`."""

    def __init__(self, send: Callable[[list[Sample]], Awaitable[None]], *, concurrency: int) -> None:
        self._send = send
        self._places = asyncio.Semaphore(concurrency)
        self._waiting: list[tuple[Sample, asyncio.Future[None]]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._clock = asyncio.get_running_loop().create_task(self._flush())

    async def score(self, sample: Sample) -> None:
        scored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, scored))
        await scored

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            waiting, self._waiting = self._waiting, []
            for first in range(0, len(waiting), MAX_SIZE):
                task = asyncio.create_task(self._one(waiting[first : first + MAX_SIZE]))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _one(self, part: list[tuple[Sample, asyncio.Future[None]]]) -> None:
        async with self._places:
            await self._send([sample for sample, _ in part])
        for _, scored in part:
            scored.set_result(None)

    def close(self) -> None:
        self._clock.cancel()


def make_samples(count: int) -> list[Sample]:
    """Samples with responses of 50 to 300 words."""
    rng = random.Random(0)
    turn = {"role": "user", "content": "How fast is the train?"}
    return [Sample([turn], "word " * rng.randint(50, 300), id=str(number)) for number in range(count)]


async def measure(score: Score, samples: Sequence[Sample], over_s: float) -> tuple[float, list[float]]:
    """Score all samples; return the seconds that it took, and those of each sample."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def one(number: int, sample: Sample) -> float:
        await asyncio.sleep(over_s * number / len(samples))
        submitted = loop.time()
        await score(sample)
        return loop.time() - submitted

    waits = await asyncio.gather(*(one(number, sample) for number, sample in enumerate(samples)))
    return loop.time() - began, waits


async def by_engine(
    node: dict[str, Any], source: SimulatedModel, samples: Sequence[Sample], over_s: float
) -> tuple[float, list[float], int]:
    config = {
        "sources": {"rm": node},
        "judges": {"quality": {"kind": "reward_model"}},
        "engine": {"deadline_s": 3600},
    }
    async with RewardEngine(config, sources={"rm": source}) as engine:

        async def score(sample: Sample) -> None:
            outcome = await engine.score(sample)
            assert isinstance(outcome, Scored), outcome

        took_s, waits = await measure(score, samples, over_s)
        return took_s, waits, source.requests


async def simulated(setting: Setting, policy: str, count: int) -> tuple[float, list[float], int]:
    samples = make_samples(setting.samples or count)
    node = {
        "kind": "reward_model",
        "base_url": "http://simulated",
        "model": "rm",
        "protocol": "vllm_score",
        "limits": {"concurrency": setting.concurrency},
    }
    source = SimulatedModel(setting, batch=Batch(max_size=MAX_SIZE) if policy == "ours" else None)
    if policy != "timer":
        return await by_engine(node, source, samples, setting.over_s)

    async def send(part: list[Sample]) -> None:
        turns = [Request(sample) for sample in part]
        await source.send_batch(turns, on_sent=lambda: None)

    timer = Timer(send, concurrency=setting.concurrency)
    took_s, waits = await measure(timer.score, samples, setting.over_s)
    timer.close()
    return took_s, waits, source.requests


def show(console: Console, title: str, measured: Sequence[Measured]) -> None:
    columns = ("policy", "samples a second", "wait p50", "wait p99", "requests", "speed, ours = 1")
    table = common.table(*columns, title=title)
    ours = measured[0].samples_per_s
    for one in measured:
        table.add_row(
            one.policy,
            f"{one.samples_per_s:,.0f}",
            f"{one.wait_p50_s:.3f} s",
            f"{one.wait_p99_s:.3f} s",
            f"{one.requests:,}",
            f"{one.samples_per_s / ours:.2f}",
        )
    console.print(table)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    options = parser.parse_args()
    console, found = Console(), []
    for setting in SETTINGS:
        rows = []
        for policy in ("ours", "single", "timer"):
            took_s, waits, requests = run(simulated(setting, policy, options.samples))
            p50_s, p99_s = percentile(waits, 0.5), percentile(waits, 0.99)
            rows.append(Measured(setting.name, policy, len(waits) / took_s, p50_s, p99_s, requests))
        show(console, setting.name, rows)
        found += rows
    common.write(options.json, found)


if __name__ == "__main__":
    main()
