"""A job on real Ray for tests: worker actors with engines, which ask strict judge servers over real sockets.

The processes of the cluster cannot import tests, so this module is pickled by value: its worker uses none of them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.sharing import ray_keeper
from qreward_plugins.testing import ServerLimits
from tests.kit import make_config

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

SLACK_S = 0.5
"""By how much an engine's window is longer than its server's: a server that gets no processor for a while, as happens
on a busy machine, sees requests closer together than they were written."""
LONG_S = 180.0
"""What nothing may take, whatever happens."""


class Worker:
    """A process with an engine of its own, as a framework's reward worker is one."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._engine = RewardEngine(tree)

    async def score(self, numbers: Iterable[int]) -> list[str]:
        """Score these samples; returns what became of each: "scored", or why not."""
        samples = [
            Sample([{"role": "user", "content": "Which number?"}], f"It is {number}.", id=str(number))
            for number in numbers
        ]
        outcomes = await self._engine.score_all(samples, deadline_s=150.0)
        return ["scored" if outcome.reward is not None else outcome.describe() for outcome in outcomes]

    async def boot(self) -> str:
        """The process of the keeper that it asks; "" if none answers. A restarted keeper is the same actor."""
        handle = self._engine._lifetime.membership._channel._handle
        with suppress(Exception):
            return await asyncio.wait_for(handle.__ray_call__.remote(_process), 5.0)
        return ""

    async def shares(self) -> dict[str, float]:
        """What it may use of the limits of its source."""
        return dict(self._engine.upstreams["a"].quota.share)


def tree(server: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of an engine that asks this server."""
    engine = {"scheduling": {"hedge": False}}
    return make_config({"a": server}, limits={"a": limits}, total_s=60, judge={"max_tokens": 64}, engine=engine)


def both_limits(window_s: float, **limits: float) -> tuple[ServerLimits, dict[str, Any]]:
    """Limits as a server enforces them and as a configuration declares them: `requests` in a window, and others."""

    def spelled(seconds: float) -> dict[str, Any]:
        further = {name: limit for name, limit in limits.items() if name != "requests"}
        return {"requests_per_minute": limits["requests"] * 60 / seconds, "window_s": seconds, **further}

    return ServerLimits(**spelled(window_s)), {**spelled(window_s + SLACK_S), "window": "sliding"}


def start_workers(trees: Sequence[Mapping[str, Any]], **options: Any) -> list[Any]:
    """Worker actors, once their engines are there."""
    actor = ray.remote(Worker).options(num_cpus=0, max_concurrency=1000, **options)
    workers = [actor.remote(tree) for tree in trees]
    for worker in workers:
        pid_of(worker)
    return workers


def pid_of(actor: Any) -> int:
    """The process of an actor."""
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=LONG_S))


def keeper() -> Any:
    """The keeper of the job."""
    return ray.get_actor(ray_keeper.NAME)


def _process(_: Any) -> str:
    return f"{ray.get_runtime_context().get_node_id()} {os.getpid()}"


def boots(workers: Iterable[Any]) -> set[str]:
    """The processes of the keepers that these workers ask."""
    return set(ray.get([worker.boot.remote() for worker in workers], timeout=LONG_S))


def is_renewed(workers: Iterable[Any], before: set[str]) -> bool:
    """Whether all of them ask one keeper, which is none of these."""
    now = boots(workers)
    return len(now) == 1 and not now & {"", *before}


def check(server: Any, scoring: Sequence[Any]) -> None:
    """Every sample is scored, and the server has nothing to complain of."""
    outcomes = {outcome for part in ray.get(scoring, timeout=LONG_S) for outcome in part}
    assert outcomes == {"scored"}
    report = server.report()
    assert report.violations_total == 0, report.violations[:5]


def comes(what: Callable[[], Any], within_s: float = LONG_S) -> Any:
    """What it returns, once that is true. Fails where it takes too long."""
    ends_at = time.monotonic() + within_s
    while not (value := what()):
        if time.monotonic() > ends_at:
            raise AssertionError(f"it did not come within {within_s:g} s")
        time.sleep(0.02)
    return value
