"""The keeper as a named actor of a Ray job, and the channel to it.

Each report is one actor call, which waits for the keeper's answer. Keeper times are those of the actor's event loop.

Errors distinguish a dead actor (`KeeperLost`), which gives no shares to other workers, from an actor that cannot be
reached (`KeeperSilent`), which still may.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from typing import Any, Literal

from ..errors import ConfigurationError, KeeperLost, KeeperSilent, Mistake
from ..named_actors import first_start, get_or_start, in_thread, kill, ray_is_up, start_ahead
from .keeper import Keeper
from .membership import Channel
from .messages import Answer, Report

NAME = "qreward-keeper"


class KeeperActor:
    """Runs the keeper of a job's limits; started by `get_or_start`."""

    def __init__(self) -> None:
        self._first = first_start(NAME)
        self._keeper: Keeper | None = None
        self._calls: dict[tuple[str, int], asyncio.Future[Answer | None]] = {}
        self._wake: asyncio.TimerHandle | None = None
        self._reports = 0
        self._cpu_s_before = 0.0

    async def exchange(self, report: Report) -> Answer | None:
        """Hand a report to the keeper and wait for the answer; None if a newer report of its worker came."""
        loop = asyncio.get_running_loop()
        if self._keeper is None:
            # The event loop, and with it the clock, exists only since the first call.
            self._keeper = Keeper(loop.time(), boot=secrets.token_hex(8), first=self._first)
            self._cpu_s_before = time.process_time()
        self._reports += 1
        call = report.worker, report.number
        if call in self._calls:
            return None  # a duplicate: the first call returns the answer
        answered: asyncio.Future[Answer | None] = loop.create_future()
        self._calls[call] = answered
        self._keeper.report(report, loop.time())
        self._pump()
        return await answered

    async def statistics(self) -> dict[str, Any]:
        """Return the keeper's `boot`, the number of `workers` that report, the number of `reports` received, and
        `cpu_s`, the CPU seconds of its process since the first report.
        """
        return {
            "boot": self._keeper.boot if self._keeper is not None else "",
            "workers": self._keeper.workers if self._keeper is not None else 0,
            "reports": self._reports,
            "cpu_s": time.process_time() - self._cpu_s_before if self._keeper is not None else 0.0,
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
    """The `Channel` to the keeper of this Ray job."""

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


def open_channel(shared: Literal["auto", "ray", "local", "off"]) -> Channel | None:
    """Open the channel that `engine.shared` selects, and start the keeper in the background; None if limits are not
    shared: for `local` and `off`, and for `auto` if Ray is not initialised.

    Raises `ConfigurationError` for `ray` if Ray is not initialised.
    """
    if shared == "ray" and not ray_is_up():
        problem = "needs Ray, which is not initialised in this process."
        remedy = "Call ray.init() before you create the engine, or set it to `auto` or `local`."
        raise ConfigurationError([Mistake("engine.shared", problem, remedy)])
    if shared in ("local", "off") or not ray_is_up():
        return None
    start_ahead(NAME, KeeperActor)
    return RayKeeper()
