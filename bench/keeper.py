"""What the quota keeper costs, and how much of the limits it distributes: many workers on one keeper, in virtual time.

Keeper and quotas are the real ones; network, clocks and servers are simulated (see
`qreward_plugins/simulation/cluster.py`). Shown are the share of the allowed rate that reaches the servers in each
minute, how often a strict sliding window found more than the limit (must be never), how many requests are sent for each
call to the keeper, and the processor time of a call in the keeper, without what Ray adds to it.

    python bench/keeper.py [--workers N] [--minutes M] [--per-minute L ...] [--demand equal skewed moving] [--json FILE]

`equal`: all workers have as much work. `skewed`: a sixteenth of them has all of it. `moving`: another quarter works in
each minute.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qreward_plugins.simulation.cluster import Cluster
from qreward_plugins.simulation.cluster_nodes import KeeperNode
from qreward_plugins.simulation.cluster_plan import Plan, SharedSource, Work, Worker

DEMANDS = ("equal", "skewed", "moving")
MORE_THAN_ENOUGH = 1.5
MESSAGE_S = (0.001, 0.004)
DRIFT = 1e-4


class Meter:
    """Processor time spent in the keeper, call by call."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.longest_s = 0.0

    def attach(self, keeper: KeeperNode) -> None:
        """Measure everything that happens to a keeper from now on."""
        happen = keeper.happen

        def measured(*arguments: Any) -> None:
            started_at = time.process_time()
            happen(*arguments)
            took_s = time.process_time() - started_at
            self.cpu_s += took_s
            self.longest_s = max(self.longest_s, took_s)

        keeper.happen = measured  # type: ignore[method-assign]


def plan(demand: str, workers: int, per_minute: Sequence[float], minutes: int) -> Plan:
    """Workers with more work than the limits let through."""
    rng = random.Random(0)
    sources = tuple(
        SharedSource(f"s{number}", {"requests_per_minute": limit, "window": "sliding"}, (0.01, 0.06), (0.5, 2.0))
        for number, limit in enumerate(per_minute)
    )
    work: list[Work] = []
    for source, limit in zip(sources, per_minute, strict=True):
        total = MORE_THAN_ENOUGH * limit * minutes
        for worker in range(workers):
            if demand == "equal":
                work.append(Work(0.0, worker, source.key, int(total / workers) + 2))
            elif demand == "skewed" and worker < max(1, workers // 16):
                work.append(Work(0.0, worker, source.key, int(total / max(1, workers // 16)) + 2))
            elif demand == "moving":
                turns = range(worker * 4 // workers, minutes, 4)
                work += [Work(60.0 * turn, worker, source.key, int(4 * limit / workers) + 2) for turn in turns]
    clocks = [(rng.uniform(-1e5, 1e5), 1.0 + rng.uniform(-DRIFT, DRIFT)) for _ in range(workers)]
    members = tuple(Worker(rng.uniform(0.0, 1.0), False, clock) for clock in clocks)
    return Plan(0, sources, members, tuple(work), message_s=MESSAGE_S)


def measure(demand: str, workers: int, per_minute: Sequence[float], minutes: int) -> dict[str, Any]:
    """Play a cluster and return what came out."""
    cluster, meter = Cluster(plan(demand, workers, per_minute, minutes)), Meter()
    (keeper,) = cluster.keepers
    meter.attach(keeper)
    came = [0]
    used: list[list[float]] = []
    for minute in range(minutes):
        before = [server.came for server in cluster.servers.values()]
        cluster.run(60.0 * (minute + 1))
        after = [server.came for server in cluster.servers.values()]
        used.append([(new - old) / limit for old, new, limit in zip(before, after, per_minute, strict=True)])
        came.append(sum(after))
    sent = sum(new - old for old, new in pairwise(came))
    return {
        "demand": demand,
        "workers": workers,
        "per_minute": list(per_minute),
        "used": used,
        "violations": sum(len(server.broken) for server in cluster.servers.values()),
        "calls": keeper.calls,
        "calls_per_s": keeper.calls / (60.0 * minutes),
        "requests_per_call": sent / keeper.calls,
        "cpu_ms_per_call": 1e3 * meter.cpu_s / keeper.calls,
        "cores": meter.cpu_s / (60.0 * minutes),
        "longest_ms": 1e3 * meter.longest_s,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns its exit code: 1 if a limit was broken."""
    parser = argparse.ArgumentParser(description="The quota keeper with many workers, in virtual time.")
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--minutes", type=int, default=4)
    parser.add_argument("--per-minute", type=float, nargs="+", default=[6000.0, 600.0], help="a source for each")
    parser.add_argument("--demand", nargs="+", choices=DEMANDS, default=list(DEMANDS))
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args(arguments)
    table = Table(
        "demand", "used, least minute", "violations", "calls/s", "requests/call", "CPU ms/call", "cores", "longest ms"
    )
    found = []
    for demand in options.demand:
        one = measure(demand, options.workers, options.per_minute, options.minutes)
        found.append(one)
        least = " ".join(f"{min(column):.1%}" for column in zip(*one["used"], strict=True))
        table.add_row(
            demand, least, f"{one['violations']}", f"{one['calls_per_s']:.0f}", f"{one['requests_per_call']:.2f}",
            f"{one['cpu_ms_per_call']:.3f}", f"{one['cores']:.3f}", f"{one['longest_ms']:.0f}",
        )  # fmt: skip
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if any(one["violations"] for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
