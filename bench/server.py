"""What the reward server adds to a sample: the same samples at an engine in the process, and over HTTP at a server.

    python bench/server.py [--samples 4000] [--callers 200]

The source answers at once, so that the engine and the server are all that is measured. Both run in one process and one
event loop, so times are those of one core, client included.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from qreward_plugins import Outcome, RewardEngine, Sample
from qreward_plugins.client import RewardClient
from qreward_plugins.observers.batch_report import percentile
from qreward_plugins.server.server import RewardServer
from qreward_plugins.sources import Reply, Request

CONFIG = {
    "sources": {"instant": {"kind": "http", "url": "http://127.0.0.1:9"}},
    "judges": {"quality": {"kind": "function"}},
    "engine": {"shared": "off"},
}
ROUNDS = 3


class Instant:
    """Answers at once."""

    name, model, slots = "instant", "instant", None

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        on_sent()
        return Reply(value=1.0)

    async def aclose(self) -> None:
        pass


def samples(count: int) -> list[Sample]:
    return [Sample([{"role": "user", "content": "?"}], f"an answer of some length, number {i}") for i in range(count)]


async def one_by_one(
    score: Callable[[Sample], Awaitable[Outcome]], rows: list[Sample], callers: int
) -> tuple[float, float]:
    """Return samples a second, and the 99th percentile of their latency in ms."""
    waiting, latencies_ms = iter(rows), []

    async def caller() -> None:
        for row in waiting:
            started_at = time.perf_counter()
            outcome = await score(row)
            assert outcome.reward == 1.0
            latencies_ms.append(1e3 * (time.perf_counter() - started_at))

    started_at = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return len(rows) / (time.perf_counter() - started_at), percentile(latencies_ms, 0.99)


async def measure(count: int, callers: int) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(RewardEngine(CONFIG, sources={"instant": Instant()}))
        server = await stack.enter_async_context(RewardServer(engine, port=0))
        client = await stack.enter_async_context(RewardClient(server.url))
        rows = samples(count)
        best: dict[str, tuple[float, float]] = {}
        for _ in range(ROUNDS):
            for name, score in (("engine, one by one", engine.score), ("server, one by one", client.score)):
                best[name] = max(best.get(name, (0.0, 0.0)), await one_by_one(score, rows, callers))
            for name, score_all in (("engine, a batch", engine.score_all), ("server, a batch", client.score_all)):
                started_at = time.perf_counter()
                await score_all(rows)
                rate = count / (time.perf_counter() - started_at)
                best[name] = max(best.get(name, (0.0, float("nan"))), (rate, float("nan")))
        print(f"{count:,} samples, {callers} callers, best of {ROUNDS} rounds")
        for name, (rate, p99_ms) in best.items():
            peer = best[name.replace("server", "engine")][0]
            p99 = f"p99 {p99_ms:7.1f} ms" if p99_ms == p99_ms else " " * 15
            print(f"  {name:<20} {rate:9,.0f} samples/s   {p99}   {1e6 / rate:7.0f} us a sample   x {peer / rate:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--callers", type=int, default=200)
    options = parser.parse_args()
    asyncio.run(measure(options.samples, options.callers))


if __name__ == "__main__":
    main()
