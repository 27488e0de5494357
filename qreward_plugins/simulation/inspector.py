"""Inspects the private state of the engine of a trial: finds calls that wait while nothing is in flight, and objects
that are left after the trial.

The other checks use public results only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from ..engine import RewardEngine
from ..scheduling import Dispatcher, Job
from .clock import VirtualTimeLoop
from .record import Record, WatchedServer

IDLE_S = 0.3
"""Slightly longer than the planner may leave a source idle before it chooses again."""
_LOOKS = 14
_LONGEST_WAIT_S = 300.0
"""More than any window or pause in a trial. A source that needs more while nothing is in flight has miscounted."""


class Inspector:
    """Inspects one engine, and adds what is wrong to `record`."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._engine: RewardEngine
        self._dispatcher: Dispatcher
        self._waits_for_cheaper = False
        self._servers: Mapping[str, WatchedServer] = {}
        self._in_flight = 0
        self._changes = 0
        self._looks = 0
        self._seen: tuple[int, frozenset[str]] = (-1, frozenset())
        self._look: asyncio.TimerHandle | None = None

    def watch(self, engine: RewardEngine, servers: Mapping[str, WatchedServer], *, waits_for_cheaper: bool) -> None:
        """Inspect `engine`, which serves the running event loop, from now on. `waits_for_cheaper`: whether it may leave
        a source idle because a cheaper one will do.
        """
        self._engine, self._servers = engine, servers
        self._waits_for_cheaper = waits_for_cheaper
        self._dispatcher = engine.dispatcher()

    def close(self) -> None:
        """Stop checking for progress."""
        if self._look is not None:
            self._look.cancel()

    # Progress

    def changed(self, by: int) -> None:
        """Count `by` more requests in flight; fewer if it is negative."""
        self._in_flight += by
        self._changes += 1
        if not self._in_flight:
            self.arm()

    def arm(self) -> None:
        """Check soon whether the jobs that wait make progress."""
        self._looks = 0
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(IDLE_S, self._look_around)

    def _look_around(self) -> None:
        self._look = None
        dispatcher = self._dispatcher
        if self._in_flight or not dispatcher._jobs:
            self._seen = -1, frozenset()
            return
        loop = asyncio.get_running_loop()
        now, queue, able, stalls = loop.time(), dispatcher._planner.queue, set(), self._record.stalls
        for name, upstream in self._engine.upstreams.items():
            job = queue.first(name)
            if upstream.health.unusable:
                continue
            if upstream.breaker.wait_s(now) == math.inf:
                stalls.append(f"at {now:.6f} s the breaker of {name} waits for a probe, and none is under way")
            elif upstream.quota.wait_s(0, now) == math.inf:
                stalls.append(f"at {now:.6f} s the quota of {name} waits for a request to end, and none is under way")
            elif job is not None:
                wait_s = upstream.wait_s(upstream.tokens(job.request), now)
                if wait_s <= 0 and not self._waits_for_cheaper:
                    able.add(name)
                elif wait_s > _LONGEST_WAIT_S:
                    stalls.append(f"at {now:.6f} s {name} asks {job.request.sample.id} to wait for {wait_s:.3f} s")
        for job in _stuck_jobs(dispatcher, now):
            stalls.append(
                f"at {now:.6f} s {job.request.sample.id} is lost: not queued, not in a backoff, and not in flight"
            )
        before, able_before = self._seen
        stuck = able & able_before if before == self._changes else set()
        if stuck:
            stalls.append(f"until {now:.6f} s nothing was under way and {', '.join(sorted(stuck))} could send")
        self._seen = self._changes, frozenset(able)
        self._looks += 1
        if not stalls and self._looks < _LOOKS:
            # A source that can send now is checked again soon; a wait for a window may be long.
            again_s = IDLE_S if able else IDLE_S * 1.5**self._looks
            self._look = loop.call_later(again_s, self._look_around)

    # Leftovers

    def look_for_leftovers(self, when: str) -> None:
        """Record the objects that are left while no call is open."""
        left = self._record.left
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            left.append(f"{when} {len(tasks)} tasks were left, one of them {_name_of(tasks)}")
        for name, server in self._servers.items():
            if server.open:
                left.append(f"{when} {server.open} requests were under way at {name}")
        for name, upstream in self._engine.upstreams.items():
            quota = upstream.quota
            held = {
                "attempts": len(upstream.live),
                "requests in flight": quota.in_flight,
                "reserved requests": quota.requests.held,
                "reserved tokens": quota.tokens.held,
            }
            left += [f"{when} {name} held {amount:g} {what}" for what, amount in held.items() if abs(amount) > 1e-6]
        dispatcher = self._dispatcher
        if dispatcher._jobs or len(dispatcher._planner.queue):
            left.append(f"{when} {len(dispatcher._jobs)} jobs were open, {len(dispatcher._planner.queue)} queued")

    def look_for_timers(self) -> None:
        """Record the timers that are set after closing."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for timer in loop._scheduled:
            callback = getattr(timer, "_callback", None)
            module = getattr(callback, "__module__", None) or ""
            if not timer.cancelled() and module.startswith("qreward_plugins.") and ".simulation" not in module:
                name = f"{module}.{getattr(callback, '__qualname__', callback)}"
                self._record.left.append(f"after closing, a timer of {name} was set for {timer.when():.6f} s")


def _name_of(tasks: set[asyncio.Task[Any]]) -> str:
    return min(getattr(task.get_coro(), "__qualname__", "unknown") for task in tasks)


def _stuck_jobs(dispatcher: Dispatcher, now: float) -> list[Job]:
    """Jobs that nothing will ever start or end, between two steps of the event loop."""
    arrived, equal_calls = set(dispatcher._arrived), dispatcher._equal_calls

    def stuck(job: Job) -> bool:
        timer = job.backoff_timer
        return not (job.entry or job in equal_calls or (timer is not None and timer.when() >= now))

    return [job for job in dispatcher._jobs if not (job.live or job.undecided or job in arrived) and stuck(job)]
