"""What `accelerate` costs a call, and how soon a batch of calls ends, beside three other decorators, in one run.

    bare       the function itself; in batches, under an asyncio.Semaphore
    ours       `accelerate` with retries and a rate
    tenacity   tenacity's retries, with aiolimiter for the rate
    stamina    stamina's retries, with aiolimiter for the rate
    QReward    `schedule` of QReward, with retries and its limit

The overhead is wall time of this process: the median of several rounds, in which all of them take turns. The makespan
is in virtual time: 512 calls of simulated functions with errors, stragglers and a rate limit. All may have 32 calls in
flight, and retry until the last call has its value. QReward reads the wall clock, so it has no makespan here; nor
have the others with a rate, because aiolimiter's waits end just before their time on an exact clock, for ever.

    python bench/acceleration.py [--calls N] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import common
from rich.console import Console

from qreward_plugins import accelerate
from qreward_plugins.simulation import run

CALLS = 512
IN_FLIGHT = 32
RETRIES = 50
FAST_PER_S = 100_000
MODES = ("single", "batch")
Function = Callable[[int], Awaitable[int]]
Decorate = Callable[[Function, float], Function]


def ours(function: Function, rate: float, **options: Any) -> Any:
    return accelerate(function, rate=rate, retries=RETRIES, interval_s=0.5, concurrency=IN_FLIGHT, seed=1, **options)


def _limited(function: Function, rate: float) -> Function:
    from aiolimiter import AsyncLimiter

    limiter = AsyncLimiter(max(1.0, rate / 20), max(1.0, rate / 20) / rate)

    async def limited(x: int) -> int:
        async with limiter:
            return await function(x)

    return limited


def tenacity(function: Function, rate: float) -> Function:
    from tenacity import retry, stop_after_attempt, wait_random_exponential

    wait = wait_random_exponential(multiplier=0.5, max=20)
    return retry(stop=stop_after_attempt(1 + RETRIES), wait=wait)(_limited(function, rate))


def stamina(function: Function, rate: float) -> Function:
    import stamina

    stamina.instrumentation.set_on_retry_hooks([])
    retry = stamina.retry(on=Exception, attempts=1 + RETRIES, timeout=None, wait_initial=0.5, wait_max=20)
    return retry(_limited(function, rate))


def qreward(function: Function, rate: float) -> Function:
    from qreward.utils.schedule import schedule

    window_s = max(1.0, 1 / rate)
    decorated: Function = schedule(
        retry_times=RETRIES, retry_interval=0.5, limit_size=max(1, int(rate * window_s)), limit_window=window_s
    )(function)
    return decorated


OTHERS: dict[str, Decorate] = {"tenacity": tenacity, "stamina": stamina, "QReward": qreward}


def available() -> dict[str, Decorate]:
    found: dict[str, Decorate] = {}
    for name, decorate in OTHERS.items():
        try:
            decorate(_nothing, 1.0)
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
        else:
            found[name] = decorate
    return found


async def _nothing(x: int) -> int:
    return x


async def overhead(calls: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of a call: one after the other, and as a batch."""
    functions: dict[str, Any] = {"bare": _nothing, "ours": ours(_nothing, FAST_PER_S)}
    functions |= {name: decorate(_nothing, FAST_PER_S) for name, decorate in available().items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            began = time.perf_counter()
            for number in range(calls):
                await function(number)
            between = time.perf_counter()
            await (function.map(range(calls)) if name == "ours" else _batch(function, calls))
            taken[name].append((between - began, time.perf_counter() - between))
    return {
        name: {
            mode: statistics.median(values) / calls * 1e6
            for mode, values in zip(MODES, zip(*rows, strict=True), strict=True)
        }
        for name, rows in taken.items()
    }


async def _batch(function: Function, calls: int) -> None:
    free = asyncio.Semaphore(IN_FLIGHT)

    async def one(number: int) -> None:
        async with free:
            await function(number)

    await asyncio.gather(*(one(number) for number in range(calls)))


class Simulated:
    """A function that takes about a second. Draws are by the number of the call and the attempt, the same for all."""

    def __init__(self, *, errors: float = 0.0, stragglers: float = 0.0) -> None:
        self._errors, self._stragglers = errors, stragglers
        self._attempts: dict[int, int] = {}

    async def __call__(self, x: int) -> int:
        attempt = self._attempts[x] = self._attempts.get(x, -1) + 1
        rng = random.Random(1_000_003 * x + attempt)
        seconds = rng.lognormvariate(0.0, 0.3)
        if rng.random() < self._stragglers:
            seconds *= 20
        if rng.random() < self._errors:
            await asyncio.sleep(seconds / 4)
            raise ConnectionError
        await asyncio.sleep(seconds)
        return x


SCENARIOS: dict[str, tuple[dict[str, float], float]] = {
    "plain": ({}, FAST_PER_S),
    "errors": ({"errors": 0.2}, FAST_PER_S),
    "stragglers": ({"stragglers": 0.02}, FAST_PER_S),
    "rate": ({}, 10.0),
    "everything": ({"errors": 0.2, "stragglers": 0.02}, 15.0),
}


def makespans() -> dict[str, dict[str, float]]:
    """Virtual seconds of 512 calls, by scenario."""
    found: dict[str, dict[str, float]] = {}
    for scenario, (faults, rate) in SCENARIOS.items():
        found[scenario] = {"ours": _makespan(faults, lambda f, r=rate: ours(f, r))}
        found[scenario]["ours, hedged"] = _makespan(faults, lambda f, r=rate: ours(f, r, hedge=True))
        for name, decorate in available().items():
            if name == "QReward" or rate < FAST_PER_S:
                continue
            found[scenario][name] = _makespan(faults, lambda f, d=decorate, r=rate: d(f, r))
    return found


def _makespan(faults: dict[str, float], decorate: Callable[[Function], Any]) -> float:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        simulated = Simulated(**faults)

        async def call(x: int) -> int:
            return await simulated(x)

        function = decorate(call)
        await (function.map(range(CALLS)) if hasattr(function, "map") else _batch(function, CALLS))
        return loop.time()

    random.seed(1)
    return run(main())


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    console = Console()
    costs = asyncio.run(overhead(arguments.calls, arguments.rounds))
    table = common.table("", "us a call", "us in a batch", "single / ours", "batch / ours")
    for name, cost in costs.items():
        ratios = [cost[mode] / costs["ours"][mode] for mode in MODES]
        table.add_row(name, f"{cost['single']:.1f}", f"{cost['batch']:.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    console.print(table)
    ends = makespans()
    names = list(next(iter(ends.values())))
    table = common.table("makespan of 512 calls, s", *names)
    for scenario, by_name in ends.items():
        table.add_row(scenario, *(f"{by_name[name]:.1f}" if name in by_name else "-" for name in names))
    console.print(table)
    common.write(arguments.json, {"overhead_us": costs, "makespan_s": ends})


if __name__ == "__main__":
    main()
