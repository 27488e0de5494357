"""A limit that nobody declared, learned by the workers of one job: the real engines and keeper in virtual time.

A simulated server allows 600 requests in any minute. The workers have more to ask than it takes, and find its limit out
by 429s or `x-ratelimit` headers. Shown are the 429s, and the rate after three minutes: with one worker, with several
that a keeper joins, and with several that each learn alone (`--alone`).

    python bench/learned_limits.py [--workers 1 8 32] [--minutes 8] [--seeds 1] [--alone] [--json FILE]
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import common
from rich.console import Console
from rich.progress import track
from rich.table import Table

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.sharing.keeper import Keeper
from qreward_plugins.sharing.messages import Answer, Report
from qreward_plugins.simulation import Luck, Server, SimulatedServer, run

PER_MINUTE = 600
LEARNED_AFTER = 3
"""Minutes after which the rate counts."""
SERVERS: dict[str, dict[str, Any]] = {
    "Retry-After": {},
    "neither": {"retry_after": "none"},
    "Retry-After and headers": {"announces": "right"},
    "headers": {"announces": "right", "retry_after": "none"},
}
"""What the server tells its clients."""


@dataclass(frozen=True)
class Result:
    """One run."""

    says: str
    workers: int
    alone: bool
    seed: int
    rejected: tuple[int, ...]
    """429s in each minute."""
    accepted: tuple[int, ...]
    """Requests that the server accepted in each minute."""

    @property
    def rate(self) -> float:
        """Accepted requests a minute after three minutes."""
        return fmean(self.accepted[LEARNED_AFTER:])


class Line:
    """A worker's way to a keeper in the same event loop. A message takes 1 ms."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def exchange(self, report: Report) -> Answer | None:
        await asyncio.sleep(0.001)
        answer = await self._keeper.exchange(report)
        await asyncio.sleep(0.001)
        return answer

    async def end_keeper(self) -> None:
        """It never falls silent."""


async def play(says: str, workers: int, *, alone: bool = False, minutes: int = 8, seed: int = 0) -> Result:
    """Let workers ask a server for so many minutes. Each gets its part of the samples by chance, as verl's do."""
    loop = asyncio.get_running_loop()
    source = SimulatedServer(
        Server("judge", requests_per_minute=PER_MINUTE, seconds_per_unit=2.0, declared=False, **SERVERS[says]),
        Luck(seed),
    )
    keeper = Keeper(first=True)
    tree = {
        "sources": {"judge": {"kind": "openai", "base_url": "http://localhost", "model": "judge"}},
        "judges": {"quality": {"kind": "llm", "score_range": [0, 10]}},
        "engine": {"seed": seed, "deadline_s": 36_000},
    }
    engines = [
        RewardEngine(tree, sources={"judge": source}, channel=None if alone else Line(keeper)) for _ in range(workers)
    ]
    rng = random.Random(seed)
    drawn: list[list[Sample]] = [[] for _ in engines]
    for number in range(PER_MINUTE * (minutes + 2)):
        messages = [{"role": "user", "content": "Which number is it?"}]
        sample = Sample(messages, f"It is {number}.", id=str(number), extras={"work": 1.0})
        drawn[rng.randrange(workers)].append(sample)
    scoring = [loop.create_task(engine.score_all(mine)) for engine, mine in zip(engines, drawn, strict=True)]
    await asyncio.sleep(60.0 * minutes)
    rejected = Counter(int(at // 60) for at, _ in source.violations)
    arrived = Counter(int(at // 60) for at in source.arrivals)
    for task in scoring:
        task.cancel()
    await asyncio.gather(*scoring, return_exceptions=True)
    for engine in engines:
        await engine.aclose()
    each = range(minutes)
    accepted = tuple(arrived[minute] - rejected[minute] for minute in each)
    return Result(says, workers, alone, seed, tuple(rejected[minute] for minute in each), accepted)


def table(results: Sequence[Result]) -> Table:
    """Return the mean figures over the seeds."""
    columns = ("the server states", "workers", "429s", "x one worker", "of them after 3 min", "rate after 3 min")
    shown = common.table(*columns, title=f"An undeclared limit of {PER_MINUTE} requests a minute")
    found: dict[tuple[str, int, bool], list[Result]] = {}
    for result in results:
        found.setdefault((result.says, result.workers, result.alone), []).append(result)
    for (says, workers, alone), runs in found.items():
        rejected = fmean(sum(each.rejected) for each in runs)
        of_one = fmean(sum(each.rejected) for each in found.get((says, 1, False), runs))
        shown.add_row(
            says,
            f"{workers}, each alone" if alone else str(workers),
            f"{rejected:,.0f}",
            f"{rejected / max(1.0, of_one):.2f}",
            f"{fmean(sum(each.rejected[LEARNED_AFTER:]) for each in runs):,.0f}",
            f"{fmean(each.rate for each in runs) / PER_MINUTE:.1%}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--says", nargs="+", choices=list(SERVERS), default=list(SERVERS), help="what the server states"
    )
    parser.add_argument("--minutes", type=int, default=8, help="length of a run; more than 3")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="also without a keeper")
    chosen = parser.parse_args(arguments)
    if chosen.minutes <= LEARNED_AFTER:
        parser.error(f"--minutes is more than {LEARNED_AFTER}: the limit is learned in the first ones")
    logging.getLogger("qreward_plugins").setLevel(logging.CRITICAL)
    work = [
        (says, workers, alone, seed)
        for says in chosen.says
        for alone in ((False, True) if chosen.alone else (False,))
        for workers in chosen.workers
        for seed in range(chosen.seeds)
    ]
    results = [
        run(play(says, workers, alone=alone, minutes=chosen.minutes, seed=seed))
        for says, workers, alone, seed in track(work, console=Console(stderr=True))
    ]
    Console().print(table(results))
    common.write(chosen.json, results)


if __name__ == "__main__":
    main()
