"""The keeper as a named actor of a Ray job, and the channel to it.

Each report is one actor call, which waits for the keeper's answer. Keeper times are those of the actor's event loop.

Errors distinguish a dead actor (`KeeperLost`), which gives no shares to other workers, from an actor that cannot be
reached (`KeeperSilent`), which still may.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from ..errors import KeeperLost, KeeperSilent
from ..system.ray_actors import first_start, get_or_start, kill
from ..system.threads import in_thread
from .keeper import Keeper
from .messages import Answer, Report

NAME = "qreward-keeper"


class KeeperActor:
    """Runs the keeper of a job's limits; started by `get_or_start`."""

    def __init__(self) -> None:
        self._first = first_start(NAME)
        self._keeper: Keeper | None = None

    async def exchange(self, report: Report) -> Answer | None:
        """Hand a report to the keeper and wait for the answer; None if a newer report of its worker came."""
        if self._keeper is None:
            # The event loop, and with it the clock, exists only since the first call.
            self._keeper = Keeper(first=self._first)
        return await self._keeper.exchange(report)


class RayKeeper:
    """The `Channel` to the keeper of this Ray job."""

    kept_by = "an actor of the Ray job"

    def __init__(self) -> None:
        self._handle: Any = None
        self._finding: asyncio.Future[Any] | None = None

    async def exchange(self, report: Report) -> Answer | None:
        from ray.exceptions import ActorDiedError

        handle = self._handle
        if handle is None and report.leaves:
            return None  # the last report of a worker does not start a keeper
        try:
            if handle is None:
                handle = await self._find()
            answer: Answer | None = await handle.exchange.remote(report)
        except ActorDiedError:
            self._forget(handle)
            raise KeeperLost("the quota keeper has died; a new one is started") from None
        except Exception as error:
            # No other exception of Ray proves that the keeper is dead, so it may still give shares to others.
            raise KeeperSilent(f"the quota keeper cannot be reached ({type(error).__name__})") from None
        return answer

    async def end_keeper(self) -> None:
        handle = self._handle
        if handle is not None:
            self._forget(handle)
            # No wait for the result: the next report looks the keeper up again.
            in_thread(functools.partial(kill, handle)).add_done_callback(_retrieve)

    async def aclose(self) -> None:
        """Nothing is open: calls belong to Ray."""

    async def _find(self) -> Any:
        """Return the keeper's handle. Concurrent calls share one lookup."""
        finding = self._finding
        if finding is None or finding.done() or finding.get_loop() is not asyncio.get_running_loop():
            finding = self._finding = in_thread(functools.partial(get_or_start, NAME, KeeperActor))
            finding.add_done_callback(_retrieve)
        self._handle = await asyncio.shield(finding)
        return self._handle

    def _forget(self, handle: Any) -> None:
        if self._handle is handle:
            self._handle = self._finding = None


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()
