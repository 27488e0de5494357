"""The keeper as a named actor of a Ray job, and the way to it.

The actor runs the keeper's books on its event loop's clock, one call for every report, and answers when the books say
so. Which end of the line failed decides what a worker may do: a dead actor cannot have given anything away since, one
that is merely not to be reached can.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from ..errors import KeeperLost, KeeperSilent
from .keeper import Keeper
from .messages import Answer, Report
from .named_actors import first_start, get_or_start, kill

NAME = "qreward-keeper"


class KeeperActor:
    """The keeper of a job's limits, for `get_or_start`."""

    def __init__(self) -> None:
        self._first = first_start(NAME)
        self._keeper: Keeper | None = None
        self._calls: dict[tuple[str, int], asyncio.Future[Answer | None]] = {}
        self._wake: asyncio.TimerHandle | None = None
        self._reports = 0

    async def exchange(self, report: Report) -> Answer | None:
        """Take in a report and return its answer, when there is one; None: a newer one came first."""
        loop = asyncio.get_running_loop()
        if self._keeper is None:
            # The clock of the loop that the calls run on exists with the first of them.
            self._keeper = Keeper(loop.time(), boot=secrets.token_hex(8), first=self._first)
        self._reports += 1
        answered = self._calls[report.worker, report.number] = loop.create_future()
        self._keeper.report(report, loop.time())
        self._pump()
        return await answered

    async def statistics(self) -> dict[str, Any]:
        """What the keeper has done: `boot`, `workers` heard of, `reports` taken in and `cpu_s` of its process."""
        return {
            "boot": self._keeper.boot if self._keeper is not None else "",
            "workers": self._keeper.workers if self._keeper is not None else 0,
            "reports": self._reports,
            "cpu_s": time.process_time(),
        }

    def _pump(self) -> None:
        keeper, loop = self._keeper, asyncio.get_running_loop()
        assert keeper is not None
        now = loop.time()
        for due in keeper.due(now):
            answered = self._calls.pop((due.worker, due.number), None)
            if answered is not None and not answered.done():
                answered.set_result(due.answer)
        if self._wake is not None:
            self._wake.cancel()
        self._wake = loop.call_at(max(keeper.wake_at(now), now + 1e-3), self._pump)


class RayKeeper:
    """The way to the keeper of this Ray job: a `Channel`."""

    def __init__(self) -> None:
        self._handle: Any = None

    async def exchange(self, report: Report) -> Answer | None:
        from ray.exceptions import ActorDiedError, RayError

        try:
            if self._handle is None:
                self._handle = await asyncio.get_running_loop().run_in_executor(None, get_or_start, NAME, KeeperActor)
            answer: Answer | None = await self._handle.exchange.remote(report)
        except ActorDiedError:
            self._handle = None
            raise KeeperLost("the quota keeper has died; it is started anew") from None
        except (RayError, ValueError, OSError) as error:
            raise KeeperSilent(f"the quota keeper cannot be reached ({type(error).__name__})") from None
        return answer

    async def end_keeper(self) -> None:
        from ray.exceptions import RayError

        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                await asyncio.get_running_loop().run_in_executor(None, kill, handle)
            except (RayError, ValueError, OSError):
                return  # the next who asks finds out what there is


__all__ = ["NAME", "KeeperActor", "RayKeeper"]
