"""The keeper of shared limits as an actor of a real Ray: how many reports a second it answers, and at what CPU time.

    python bench/keeper_calls.py [--processes 2] [--seconds 10]

`keeper.py` has it without Ray, with a thousand workers; `cluster.py` has whole batches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence

import ray

from qreward_plugins.config import Limits
from qreward_plugins.quotas.shared import SharedQuota
from qreward_plugins.sharing.member import Demand, Member
from qreward_plugins.sharing.ray_keeper import NAME, KeeperActor
from qreward_plugins.system.ray_actors import get_or_start


class Caller:
    """Reports to the keeper as fast as it answers, each time as a new worker, which is always answered at once."""

    async def call(self, number: int, seconds: float) -> int:
        from qreward_plugins.sharing.ray_keeper import RayKeeper

        channel, loop, count = RayKeeper(), asyncio.get_running_loop(), 0
        ends_at = loop.time() + seconds
        while loop.time() < ends_at:
            quota = SharedQuota(Limits(requests_per_minute=6000), source="judge")
            member = Member(f"{number}/{count}", {"judge": quota})
            answer = await channel.exchange(member.report(loop.time(), {"judge": Demand(3)}, {}))
            assert answer is not None
            assert member.accept(answer, loop.time())
            await channel.exchange(member.last_report(loop.time()))
            count += 2
        return count


def measure(callers: int, seconds: float) -> str:
    """How many reports a second the keeper answers, asked by so many processes at once."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        actors = [ray.remote(num_cpus=0)(Caller).remote() for _ in range(callers)]
        ray.get([actor.call.remote(number, 1.0) for number, actor in enumerate(actors)])
        keeper = get_or_start(NAME, KeeperActor)
        before, started = ray.get(keeper.statistics.remote()), time.perf_counter()
        calls = sum(ray.get([actor.call.remote(callers + number, seconds) for number, actor in enumerate(actors)]))
        took_s, after = time.perf_counter() - started, ray.get(keeper.statistics.remote())
    finally:
        ray.shutdown()
    cpu_s = after["cpu_s"] - before["cpu_s"]
    return (
        f"{callers} processes: {calls / took_s:,.0f} reports/s answered, {1e3 * cpu_s / calls:.2f} ms of the keeper's "
        f"CPU time each ({cpu_s / took_s:.0%} of a core), on {os.cpu_count()} cores"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Reports a second that the keeper of shared limits answers on Ray.")
    parser.add_argument("--processes", type=int, default=2, help="how many ask at once")
    parser.add_argument("--seconds", type=float, default=10.0, help="for how long")
    chosen = parser.parse_args(arguments)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    print(measure(chosen.processes, chosen.seconds))


if __name__ == "__main__":
    main()
