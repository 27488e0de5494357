"""One limit over many processes of a Ray job: this package's shared limits beside verl's `rate_limited` manager.

Both are the real thing on a real Ray. Worker actors, as verl starts them, score one batch between them, each sample by
a worker drawn at random, over one judge server with a strict sliding window: what comes beyond the limit in any window
is answered 429 and counted as a violation. The shortest time in which that limit lets the batch pass is known, so there
is a number for how much of the allowed rate was used: that time over the time it took.

    python bench/limits.py [--workers 1 8 32] [--per-window 300] [--window 30] [--windows 3] [--load N] [--json FILE]

"Most seen" and "most written" are the most requests in any window as the server read them and as workers wrote them: on
a machine without a processor to spare the server reads late. The batch is a whole number of windows, so whatever the
server refuses costs another window. `--load N` runs so many busy processes beside it, `--stop-server S` stops the
server for so long when the second window begins.

verl's manager is left out where verl is not installed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import common
import ray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.scheduling.attempts import Attempt
from qreward_plugins.sharing.ray_keeper import NAME, KeeperActor
from qreward_plugins.system.ray_actors import get_or_start
from qreward_plugins.testing import JudgeServerProcess, Latency, Report, ServerLimits

OURS, THEIRS = "ours", "verl rate_limited"
LATENCY_S = 0.2
IN_FLIGHT = 256
"""Requests at once, for all workers together: connecting for a whole window at once would test the machine."""
WIDTH = 120
"""Columns that the table wants, also where it is piped into a file."""
THEIR_TRIES = 100
"""Tries of one sample over verl's manager: none may be given up, or the batches would not be the same."""


@dataclass(frozen=True)
class Result:
    """One batch. Times are seconds."""

    policy: str
    workers: int
    samples: int
    shortest_s: float
    took_s: float
    violations: int
    earliest_s: float
    """How much too early the worst violation came, by the server's clock."""
    most_in_a_window: int
    """By when the server saw them."""
    most_written_in_a_window: int
    """By when the workers wrote them: a server that gets no processor sees them later, and closer together."""
    requests: int
    reports: int
    """Reports of workers to the keeper while the batch ran."""
    keeper_cpu_s: float

    @property
    def used(self) -> float:
        """Share of the allowed rate that was used."""
        return self.shortest_s / self.took_s


class Ours:
    """A worker with an engine, as an adapter makes it in a reward worker."""

    def __init__(self, base_url: str, requests_per_minute: float, window_s: float) -> None:
        self._written = _Written()
        limits = {
            "requests_per_minute": requests_per_minute,
            "concurrency": IN_FLIGHT,
            "window_s": window_s,
            "window": "sliding",
        }
        source = {"kind": "openai", "base_url": base_url, "model": "judge", "limits": limits}
        judge = {"kind": "llm", "score_range": [0, 1], "max_tokens": 64}
        engine = {"seed": 0, "deadline_s": 3600}
        self._engine = RewardEngine({"sources": {"judge": source}, "judges": {"quality": judge}, "engine": engine})

    async def score(self, numbers: Sequence[int]) -> int:
        """Score samples as they come, one by one, as verl does; return how many have a reward."""
        outcomes = await asyncio.gather(*(self._engine.score(_sample(number)) for number in numbers))
        return sum(outcome.reward is not None for outcome in outcomes)

    async def written(self) -> list[float]:
        """When its requests were written, in seconds of the machine's monotonic clock, which all processes share."""
        return self._written.at

    async def close(self) -> None:
        await self._engine.aclose()


class _Written:
    """Notes when the attempts of this process are written."""

    def __init__(self) -> None:
        self.at: list[float] = []
        sent = Attempt._sent

        def note(attempt: Attempt) -> None:
            sent(attempt)
            self.at.append(time.monotonic())

        Attempt._sent = note  # type: ignore[assignment,method-assign]


class Theirs:
    """A worker with verl's manager; its `compute_score` asks the judge, and asks again after a 429."""

    def __init__(self, base_url: str, requests_per_minute: float, window_s: float) -> None:
        from omegaconf import OmegaConf
        from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager

        self._url = f"{base_url}/chat/completions"
        self._http: Any = None
        self._written: list[float] = []
        reward = {"max_concurrent": IN_FLIGHT, "timeout": 3600.0, "max_rpm": requests_per_minute}
        self._manager = RateLimitedRewardManager(OmegaConf.create({"reward": reward}), _Tokenizer(), self._compute)

    async def score(self, numbers: Sequence[int]) -> int:
        import aiohttp

        async with aiohttp.ClientSession(trace_configs=[self._trace()]) as self._http:
            results = await asyncio.gather(*(self._manager.run_single(_row(number)) for number in numbers))
        return sum("acc" in result["reward_extra_info"] and result["reward_score"] > 0 for result in results)

    async def written(self) -> list[float]:
        """When its requests were written, as for `Ours`."""
        return self._written

    def _trace(self) -> Any:
        import aiohttp

        async def note(*_: Any) -> None:
            self._written.append(time.monotonic())

        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(note)
        return trace

    async def close(self) -> None:
        """Nothing is left open."""

    async def _compute(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        body = {"model": "judge", "messages": [{"role": "user", "content": f"Grade: {extra_info['number']}"}]}
        for _ in range(THEIR_TRIES):
            async with self._http.post(self._url, json=body) as reply:
                if reply.status == 200:
                    await reply.read()
                    return 1.0
                wait_s = float(reply.headers.get("Retry-After", "1"))
            await asyncio.sleep(wait_s)
        raise RuntimeError("the judge throttles for ever")


class _Tokenizer:
    def decode(self, ids: Any, **_: Any) -> str:
        return ""


def _sample(number: int) -> Sample:
    return Sample(
        messages=[{"role": "user", "content": f"Write {number} as a word."}],
        response=f"It is number {number}. " + "word " * (number * 37 % 80),
        data_source="bench",
    )


def _row(number: int) -> Any:
    import numpy as np
    import torch
    from verl import DataProto

    return DataProto.from_dict(
        tensors={"responses": torch.ones(1, 2, dtype=torch.long), "attention_mask": torch.ones(1, 4, dtype=torch.long)},
        non_tensors={
            "data_source": np.array(["bench"], dtype=object),
            "reward_model": np.array([{"ground_truth": ""}], dtype=object),
            "extra_info": np.array([{"number": number}], dtype=object),
        },
    )


def shares(samples: int, workers: int) -> list[list[int]]:
    """Which worker scores which samples: one drawn for each, as verl does."""
    rng = random.Random(7)
    drawn: list[list[int]] = [[] for _ in range(workers)]
    for number in range(samples):
        drawn[rng.randrange(workers)].append(number)
    return drawn


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that do nothing but work, as those of other jobs on the machine."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextmanager
def stopped(process: int, after_s: float, for_s: float) -> Iterator[None]:
    """The process does not run for so long, some time after this begins."""

    def stop() -> None:
        os.kill(process, signal.SIGSTOP)
        time.sleep(for_s)
        os.kill(process, signal.SIGCONT)

    if for_s <= 0:
        yield
        return
    timer = threading.Timer(after_s, stop)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def measure(
    policy: str, workers: int, per_window: int, window_s: float, windows: int, busy: int = 0, stop_server_s: float = 0.0
) -> Result:
    """Score as many samples as `windows` windows let pass, beside so many `busy` processes, with a server that stops
    for `stop_server_s` seconds when the second window begins.

    Ends the program when a sample has no score.
    """
    samples = per_window * windows
    limits = ServerLimits(requests_per_minute=per_window * 60 / window_s, concurrency=IN_FLIGHT, window_s=window_s)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        with JudgeServerProcess(_grade, limits=limits, latency=Latency(median_s=LATENCY_S)) as server:
            cls = ray.remote(num_cpus=0)(Ours if policy == OURS else Theirs)
            actors = [cls.remote(server.base_url, limits.requests_per_minute, window_s) for _ in range(workers)]
            # They start, import what they need and connect; then the window is empty again.
            ray.get([actor.score.remote([samples + number]) for number, actor in enumerate(actors)])
            time.sleep(window_s + 1)
            keeper = get_or_start(NAME, KeeperActor) if policy == OURS else None
            before = ray.get(keeper.__ray_call__.remote(_asked)) if keeper else Counter()
            with load(busy), stopped(server.pid, window_s - stop_server_s / 4, stop_server_s):
                started = time.perf_counter()
                scored = ray.get(
                    [actor.score.remote(mine) for actor, mine in zip(actors, shares(samples, workers), strict=True)]
                )
                took_s = time.perf_counter() - started
            after = ray.get(keeper.__ray_call__.remote(_asked)) if keeper else Counter()
            report: Report = server.report()
            written = sorted(at for mine in ray.get([actor.written.remote() for actor in actors]) for at in mine)
            ray.get([actor.close.remote() for actor in actors])
    finally:
        ray.shutdown()
    if sum(scored) != samples:
        sys.exit(f"{policy}, {workers} workers: only {sum(scored)} of {samples} samples have a score")
    return Result(
        policy,
        workers,
        samples,
        (windows - 1) * window_s + -(-per_window // IN_FLIGHT) * LATENCY_S,
        took_s,
        report.violations_total,
        max((violation.early_s or 0.0 for violation in report.violations), default=0.0),
        report.max_requests_in_window,
        most_in_a_window(written, window_s),
        report.requests - workers,
        after["reports"] - before["reports"],
        after["cpu_s"] - before["cpu_s"],
    )


def _asked(actor: KeeperActor) -> dict[str, float]:
    """What the process of the keeper was asked so far, and the processor time that it has taken."""
    keeper = actor._keeper
    return {"reports": sum(keeper._numbers.values()) if keeper else 0, "cpu_s": time.process_time()}


def most_in_a_window(written: Sequence[float], window_s: float) -> int:
    """The most of these times, which ascend, that any window holds."""
    return max((after - bisect_right(written, at - window_s) for after, at in enumerate(written, 1)), default=0)


def _grade(call: Any) -> float | str:
    return 1.0 if call.nonce is not None else "good"


def table(results: Sequence[Result], per_window: int, window_s: float) -> Table:
    alone = {result.policy: result.took_s for result in results if result.workers == 1}
    title = f"A limit of {per_window} requests in any {window_s:g} s, shared by the workers of one Ray job"
    columns = ("workers", "violations", "most seen", "most written", "rate used", "seconds", "x alone")
    shown = common.table("", *columns, "reports/attempt", "keeper CPU", title=title)
    for result in results:
        ours = result.policy == OURS
        shown.add_row(
            result.policy,
            str(result.workers),
            str(result.violations),
            str(result.most_in_a_window),
            str(result.most_written_in_a_window),
            f"{result.used:.1%}",
            f"{result.took_s:.1f}",
            f"{result.took_s / alone[result.policy]:.2f}" if result.policy in alone else "",
            f"{result.reports / result.requests:.3f}" if ours else "",
            f"{result.keeper_cpu_s / result.took_s:.1%}" if ours else "",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 32], help="worker actors")
    parser.add_argument("--per-window", type=int, default=300, help="requests that a window allows")
    parser.add_argument("--window", type=float, default=30.0, metavar="S", help="length of the window")
    parser.add_argument("--windows", type=int, default=3, help="size of the batch, in windows")
    parser.add_argument("--policies", nargs="+", choices=("ours", "verl"), default=["ours", "verl"])
    parser.add_argument("--load", type=int, default=0, metavar="N", help="busy processes beside it")
    parser.add_argument("--stop-server", type=float, default=0.0, metavar="S", help="stop the server for so long")
    chosen = parser.parse_args(arguments)
    console = Console(stderr=True)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    policies = [OURS] if "ours" in chosen.policies else []
    if "verl" in chosen.policies and find_spec("verl"):
        policies.append(THEIRS)
    work = [(policy, workers) for policy in policies for workers in chosen.workers]
    batch = chosen.per_window, chosen.window, chosen.windows
    results = []
    for policy, workers in track(work, console=console):
        results.append(measure(policy, workers, *batch, chosen.load, chosen.stop_server))
    shown = Console()
    shown.width = max(shown.width, WIDTH)
    shown.print(table(results, chosen.per_window, chosen.window))
    common.write(chosen.json, results)


if __name__ == "__main__":
    main()
