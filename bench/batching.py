"""What it brings to send several calls in one request: samples a second, and how long a sample waits.

Three policies score the same samples at the same server, in one run:

    ours       `batch` of the source: calls that wait go together as soon as the source can take a request
    single     the same engine without `batch`: one request a sample
    timer      a queue that is flushed every second, in requests of up to the same size

The simulated server takes a + b * n seconds for a request of n samples, whatever else it does, and serves `concurrency`
requests at once; all policies know that number. Time is virtual. With `--url` the server is a real one that speaks
vLLM's `POST /classify`, and time is real.

    python bench/batching.py [--samples N] [--json FILE]
    python bench/batching.py --url http://localhost:8000 --model rm --chat-template DIR --samples 512
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.config import Batch
from qreward_plugins.observers.batch_report import percentile
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply, Request

SAMPLES = 4096
MAX_SIZE = 64
FLUSH_S = 1.0
ROUNDS = 5
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


class SimulatedModel:
    """A reward model that takes a + b * n seconds for a request of n samples."""

    name, model, slots, local = "rm", "simulated", None, False

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

    async def aclose(self) -> None:
        pass


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
    node: dict[str, Any], source: Any, samples: Sequence[Sample], over_s: float
) -> tuple[Any, Any, int]:
    config = {
        "sources": {"rm": node},
        "judges": {"quality": {"kind": "reward_model"}},
        "engine": {"deadline_s": 3600},
    }
    async with RewardEngine(config, sources={"rm": source} if source else None) as engine:

        async def score(sample: Sample) -> None:
            outcome = await engine.score(sample)
            assert isinstance(outcome, Scored), outcome

        took_s, waits = await measure(score, samples, over_s)
        counted = engine.statistics().sources["rm"]
        requests = source.requests if source else counted.batches + counted.requests - counted.batched
        return took_s, waits, requests


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


async def real(options: argparse.Namespace, policy: str, over_s: float) -> tuple[float, list[float], int]:
    samples = make_samples(options.samples)
    node = {
        "kind": "reward_model",
        "base_url": options.url,
        "model": options.model,
        "chat_template": options.chat_template,
        "limits": {"concurrency": options.concurrency},
    }
    if policy != "timer":
        batch = {"batch": {"max_size": MAX_SIZE}} if policy == "ours" else {}
        return await by_engine({**node, **batch}, None, samples, over_s)
    requests = 0
    async with aiohttp.ClientSession() as session:

        async def send(part: list[Sample]) -> None:
            nonlocal requests
            requests += 1
            texts = [f"user: {sample.messages[0]['content']}\nassistant: {sample.response}" for sample in part]
            body = {"model": options.model, "input": texts, "use_activation": False}
            async with session.post(f"{options.url}/classify", json=body) as response:
                response.raise_for_status()
                await response.read()

        timer = Timer(send, concurrency=options.concurrency)
        took_s, waits = await measure(timer.score, samples, over_s)
        timer.close()
    return took_s, waits, requests


def show(console: Console, title: str, measured: Sequence[Measured]) -> None:
    table = Table("policy", "samples a second", "wait p50", "wait p99", "requests", "speed, ours = 1", title=title)
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--url", help="a server that speaks vLLM's POST /classify; default: simulated ones")
    parser.add_argument("--model", default="rm")
    parser.add_argument("--chat-template", help="the folder of the reward model, for --url")
    parser.add_argument("--concurrency", type=int, default=2, help="requests at once, for --url")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, found = Console(), []
    if options.url and not options.chat_template:
        parser.error("--url needs --chat-template")
    settings = SETTINGS if not options.url else (Setting("all at once", 0, 0, options.concurrency),)
    policies = ("ours", "single", "timer")
    for setting in settings:
        rounds: dict[str, list[Measured]] = {policy: [] for policy in policies}
        # A real server has other work. The policies take turns, so that it slows all alike; the median round counts.
        for _ in range(ROUNDS if options.url else 1):
            for policy in policies:
                began = time.perf_counter()
                if options.url:
                    took_s, waits, requests = asyncio.run(real(options, policy, setting.over_s))
                else:
                    took_s, waits, requests = run(simulated(setting, policy, options.samples))
                speed, p50_s, p99_s = len(waits) / took_s, percentile(waits, 0.5), percentile(waits, 0.99)
                rounds[policy].append(Measured(setting.name, policy, speed, p50_s, p99_s, requests))
                console.log(f"{setting.name}, {policy}: {time.perf_counter() - began:.1f} s")
        rows = [
            sorted(rounds[policy], key=lambda one: one.samples_per_s)[len(rounds[policy]) // 2] for policy in policies
        ]
        show(console, setting.name, rows)
        found += rows
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=2))


if __name__ == "__main__":
    main()
