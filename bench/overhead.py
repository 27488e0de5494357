"""What the engine costs: processor time of one scored sample, compared with bare HTTP clients.

The engine goes the whole way (prompt, queue, quota, HTTP, strict verdict); its peers post bytes that were made before
and call `json.loads` on the reply. All talk to the same judge server on loopback, in a process of its own so that only
the client is measured, and take turns in short rounds so that a busy machine slows all alike. What counts is the median
over the rounds of `time.process_time` by request: the machine's other work shows in it far less than in seconds.

    python bench/overhead.py [--samples N] [--rounds R] [--json FILE]

Both kinds of httpx are measured as they come, with at most 100 connections however many requests are under way. QReward
(its proxy manager) and litellm (its Router) do no more than they must: no limits, no retries. The peers are wanted
beside the package itself: `pip install -r bench/requirements.txt`; QReward and litellm are left out where they are not.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import aiohttp
import common
import orjson
from rich.console import Console

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.sources.base import Request
from qreward_plugins.testing import JudgeServerProcess

IN_FLIGHT = (16, 128, 512)
BASELINE = "aiohttp"

Ask = Callable[[bytes], Awaitable[Any]]
Client = Callable[[str, Sequence[Sample], Sequence[bytes], int], Coroutine[Any, Any, float]]


def make_samples(count: int) -> list[Sample]:
    """Rollouts of a usual size: a question of a sentence, a response of some hundred words."""
    return [
        Sample(
            messages=[{"role": "user", "content": f"A train covers {number} km in 3 hours. How fast is it, in km/h?"}],
            response=f"Let us see. {'Divide the distance by the time. ' * (10 + number % 40)}So it is {number / 3}.",
            ground_truth=f"{number / 3}",
            data_source="bench/trains",
            id=str(number),
        )
        for number in range(count)
    ]


def configuration(base_url: str, in_flight: int) -> dict[str, Any]:
    """One judge, with every limit declared, and none of them reached: what is measured is work, not waiting."""
    limits = {"concurrency": in_flight, "requests_per_minute": 1e9, "tokens_per_minute": 1e12}
    return {
        "sources": {"judge": {"kind": "openai", "base_url": base_url, "model": "judge", "limits": limits}},
        "judges": {"quality": {"kind": "llm"}},
        "engine": {"seed": 0},
    }


def bodies_of(samples: Sequence[Sample]) -> list[bytes]:
    """The bytes that the engine sends for these samples."""
    judge = RewardEngine(configuration("http://localhost", 1)).judges["quality"]
    return [orjson.dumps(_body(judge.request(sample, attempt=0))) for sample in samples]


def _body(request: Request) -> dict[str, Any]:
    return {"model": "judge", "messages": request.messages, **request.parameters}


async def with_engine(base_url: str, samples: Sequence[Sample], bodies: Sequence[bytes], in_flight: int) -> float:
    """Seconds of processor time that scoring all samples takes."""
    async with RewardEngine(configuration(base_url, in_flight)) as engine:
        await engine.score_all(samples[:in_flight])
        started = _started()
        outcomes = await engine.score_all(samples)
        spent = time.process_time() - started
    failed = [outcome for outcome in outcomes if not isinstance(outcome, Scored)]
    if failed:
        sys.exit(f"the judge server failed {len(failed)} of {len(outcomes)} samples: {failed[0]}")
    return spent


async def with_aiohttp(base_url: str, samples: Sequence[Sample], bodies: Sequence[bytes], in_flight: int) -> float:
    """The same exchanges by aiohttp alone."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"}) as session:

        async def ask(body: bytes) -> Any:
            async with session.post(f"{base_url}/chat/completions", data=body) as response:
                return json.loads(await response.read())

        return await _exchange(ask, bodies, in_flight)


async def with_httpx(base_url: str, samples: Sequence[Sample], bodies: Sequence[bytes], in_flight: int) -> float:
    """The same exchanges by `httpx.AsyncClient`."""
    import httpx

    return await _with_httpx(base_url, bodies, in_flight, httpx.AsyncHTTPTransport())


async def with_httpx_aiohttp(
    base_url: str, samples: Sequence[Sample], bodies: Sequence[bytes], in_flight: int
) -> float:
    """The same exchanges by `httpx.AsyncClient` over aiohttp's transport."""
    import httpx_aiohttp

    return await _with_httpx(base_url, bodies, in_flight, httpx_aiohttp.AiohttpTransport())


async def _with_httpx(base_url: str, bodies: Sequence[bytes], in_flight: int, transport: Any) -> float:
    import httpx

    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(transport=transport, headers=headers, timeout=None) as client:

        async def ask(body: bytes) -> Any:
            return json.loads((await client.post(f"{base_url}/chat/completions", content=body)).content)

        return await _exchange(ask, bodies, in_flight)


async def with_qreward(base_url: str, samples: Sequence[Sample], bodies: Sequence[bytes], in_flight: int) -> float:
    """The same exchanges by QReward's `OpenAIChatProxyManager`, without its scheduler."""
    from qreward.client import OpenAIChatProxy, OpenAIChatProxyManager

    manager = OpenAIChatProxyManager()
    manager.add_proxy("judge", OpenAIChatProxy(base_url=base_url, api_key="none", max_concurrent=in_flight))

    async def ask(body: bytes) -> Any:
        text = await manager.select_proxy().chat_completion(json.loads(body)["messages"], "judge")
        return {"choices": [text]}

    try:
        return await _exchange(ask, bodies, in_flight)
    finally:
        await manager.close()


async def with_litellm(base_url: str, samples: Sequence[Sample], bodies: Sequence[bytes], in_flight: int) -> float:
    """The same exchanges by litellm's Router with one deployment."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import uses the network
    import litellm

    litellm.suppress_debug_info, litellm.telemetry = True, False
    deployment = {"model": "openai/judge", "api_base": base_url, "api_key": "none"}
    router = litellm.Router([{"model_name": "judge", "litellm_params": deployment}], num_retries=0)

    async def ask(body: bytes) -> Any:
        reply = await router.acompletion(model="judge", messages=json.loads(body)["messages"])
        return {"choices": reply.choices}

    try:
        return await _exchange(ask, bodies, in_flight)
    finally:
        router.discard()


async def _exchange(ask: Ask, bodies: Sequence[bytes], in_flight: int) -> float:
    """Seconds of processor time for all bodies, `in_flight` at once: so many workers that take the next one."""

    async def work(rest: Iterator[bytes]) -> None:
        for body in rest:
            reply = await ask(body)
            if not reply["choices"]:
                sys.exit("the judge server did not answer as it should")

    async def exchange(amount: int | None) -> None:
        rest = iter(bodies[:amount])
        await asyncio.gather(*(work(rest) for _ in range(in_flight)))

    await exchange(in_flight)  # which opens the connections
    started = _started()
    await exchange(None)
    return time.process_time() - started


def _started() -> float:
    gc.collect()  # so that earlier garbage is not charged here
    return time.process_time()


CLIENTS: dict[str, Client] = {
    BASELINE: with_aiohttp,
    "this engine": with_engine,
    "httpx over aiohttp": with_httpx_aiohttp,
    "httpx": with_httpx,
    **({"QReward 0.1.7": with_qreward} if find_spec("qreward") else {}),
    **({"litellm's Router": with_litellm} if find_spec("litellm") else {}),
}


def measure(count: int, rounds: int, console: Console) -> dict[int, dict[str, list[float]]]:
    """Milliseconds by request of every client at every number in flight, one number a round."""
    samples = make_samples(count)
    bodies = bodies_of(samples)
    with JudgeServerProcess() as server:

        def one(name: str, in_flight: int) -> float:
            return 1000 * asyncio.run(CLIENTS[name](server.base_url, samples, bodies, in_flight)) / count

        kinds = [(name, in_flight) for in_flight in IN_FLIGHT for name in CLIENTS]
        measures = {f"{name}, {in_flight} in flight": partial(one, name, in_flight) for name, in_flight in kinds}
        found = common.turns(rounds, measures, console)
    return {n: {name: found[f"{name}, {n} in flight"] for name in CLIENTS} for n in IN_FLIGHT}


def show(spent: dict[int, dict[str, list[float]]], console: Console) -> None:
    title = "Processor time of one request, and how many times that of bare aiohttp it is"
    table = common.table("client", *(f"{in_flight} in flight" for in_flight in spent), title=title)
    for name in CLIENTS:
        cells = []
        for by_client in spent.values():
            median = statistics.median(by_client[name])
            cells.append(f"{median:.2f} ms {median / statistics.median(by_client[BASELINE]):5.2f}x")
        table.add_row(name, *cells)
    console.print(table)


def as_json(spent: dict[int, dict[str, list[float]]], count: int) -> dict[str, Any]:
    return {
        "unit": "milliseconds of processor time by request",
        "samples": count,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {name: metadata.version(name) for name in ("aiohttp", "httpx", "httpx-aiohttp")},
        "results": [
            {
                "client": name,
                "in_flight": in_flight,
                "median": statistics.median(rounds),
                "times_aiohttp": statistics.median(rounds) / statistics.median(by_client[BASELINE]),
                "rounds": rounds,
            }
            for in_flight, by_client in spent.items()
            for name, rounds in by_client.items()
        ],
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--samples", type=int, default=2000, help="requests a round (default: 2000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the median counts (default: 5)")
    options = parser.parse_args()
    if options.samples < 1 or options.rounds < 1:
        parser.error("--samples and --rounds are at least 1")
    try:
        import httpx  # noqa: F401
        import httpx_aiohttp  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"{error.name} is not installed, and the engine is measured against it: pip install httpx httpx-aiohttp"
        )
    console = Console()
    spent = measure(options.samples, options.rounds, console)
    show(spent, console)
    common.write(options.json, as_json(spent, options.samples))


if __name__ == "__main__":
    main()
