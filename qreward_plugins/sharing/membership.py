"""What keeps the shares of an engine up to date: it reports to the keeper and heeds the answers, for as long as the
engine's event loop runs.

A report is out all the time, held by the keeper until there is something to say. It is replaced by a newer one when
work waits that the keeper cannot know of. Between two reports lies a quarter of a second, so that a worker under load
asks a few times a second at most, however many requests it sends; and while it has a share it never waits for an
answer.

A keeper that is certainly gone is started anew by whoever notices; until it answers, the shares stay as they are. One
that does not answer may be well and have given the shares away, so they end by themselves; one that stays silent is
ended, so that there can be another.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from ..errors import KeeperError, KeeperLost, KeeperSilent
from ..quotas import SharedQuota
from .keeper import HOLD_S, TTL_S
from .member import Demand, Member
from .messages import Answer, Report, SourceNews

if TYPE_CHECKING:
    from ..scheduling import Dispatcher, Lane

_log = logging.getLogger("qreward_plugins.sharing")

REPORT_EVERY_S = 0.25
"""Least time between two reports."""
ANSWERED_WITHIN_S = HOLD_S + 2.0
"""Time after which a report is taken for lost."""
SILENT_AFTER_S = 3 * TTL_S
"""Time after which a keeper that does not answer is ended."""
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0
FAREWELL_WITHIN_S = 1.0


class Channel(Protocol):
    """The way to the keeper of this job."""

    async def exchange(self, report: Report) -> Answer | None:
        """Give a report and wait for its answer; None: another report of this worker came first. A keeper is found, or
        started, if need be. Raises `KeeperLost` and `KeeperSilent`. Cancelling it leaves the report with the keeper.
        """
        ...

    async def end_keeper(self) -> None:
        """End a keeper that does not answer. Raises nothing."""
        ...


class Membership:
    """Keeps the shares of one engine's sources, as long as the event loop runs in which it is started.

    `lanes` are those with a `SharedQuota`, by the keys that all workers know their sources by. Times are seconds of the
    event loop's clock.
    """

    def __init__(self, lanes: Mapping[str, Lane], channel: Channel) -> None:
        self._lanes = lanes
        self._channel = channel
        quotas = {key: lane.quota for key, lane in lanes.items() if isinstance(lane.quota, SharedQuota)}
        self.member = Member(secrets.token_hex(8), quotas)
        self._dispatcher: Dispatcher | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._urgent = asyncio.Event()
        self._sent_at = -math.inf
        self._answered_at = math.inf
        self._rested: set[str] = set()

    def start(self, dispatcher: Dispatcher) -> None:
        """Begin to report what waits in `dispatcher`, in the running event loop; one that was closed is forgotten."""
        self._dispatcher = dispatcher
        self._urgent = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._answered_at = loop.time()
        self._ending = None  # it belongs to the loop of before
        self._task = loop.create_task(self._keep())
        self._task.add_done_callback(_say_why)

    def look(self) -> None:
        """See whether something waits that the keeper should know of."""
        assert self._dispatcher is not None
        if not self._urgent.is_set():
            now = self._dispatcher.now()
            if any(self.member.short(key, self._demand(lane), now) for key, lane in self._lanes.items()):
                self._urgent.set()

    async def aclose(self) -> None:
        """Give everything back and stop; the keeper gets to know if it answers within a second."""
        if self._task is None or self._dispatcher is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._ending is not None:
            self._ending.cancel()
        if self.member.boot:
            call = asyncio.ensure_future(self._channel.exchange(self.member.farewell(self._dispatcher.now())))
            await asyncio.wait([call], timeout=FAREWELL_WITHIN_S)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        self._task = None

    async def _keep(self) -> None:
        assert self._dispatcher is not None
        backoff_s = FIRST_BACKOFF_S
        while True:
            await self._wait_until(self._sent_at + REPORT_EVERY_S)
            try:
                answer = await self._exchange()
            except KeeperError as problem:
                await self._do_without(problem)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
                continue
            now = self._dispatcher.now()
            if answer is not None and self.member.accept(answer, now):
                backoff_s = FIRST_BACKOFF_S
                self._heed(answer, now)

    async def _exchange(self) -> Answer | None:
        """The answer to a new report; None: there is something newer to report."""
        assert self._dispatcher is not None
        now = self._sent_at = self._dispatcher.now()
        self._urgent.clear()
        demands = {key: self._demand(lane) for key, lane in self._lanes.items()}
        news = {key: self._news(key, lane, now) for key, lane in self._lanes.items()}
        call = asyncio.ensure_future(self._channel.exchange(self.member.report(now, demands, news)))
        urgent = asyncio.ensure_future(self._urgent.wait())
        try:
            await asyncio.wait([call, urgent], timeout=ANSWERED_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
            if not call.done() and urgent.done():
                # An answer that is on its way already is as good.
                left_s = self._sent_at + REPORT_EVERY_S - self._dispatcher.now()
                if left_s > 0:
                    await asyncio.wait([call], timeout=left_s)
            if call.done():
                return call.result()
            if urgent.done():
                return None
            raise KeeperSilent(f"the quota keeper did not answer within {ANSWERED_WITHIN_S:g} s")
        finally:
            for waiting in (call, urgent):
                waiting.cancel()
            await asyncio.gather(call, urgent, return_exceptions=True)

    def _heed(self, answer: Answer, now: float) -> None:
        assert self._dispatcher is not None
        if now - self._answered_at > ANSWERED_WITHIN_S + LONGEST_BACKOFF_S:
            _log.info("the quota keeper answers again")
        self._answered_at = now
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.get_running_loop().call_at(self.member.valid_until, self._end)
        for key, said in answer.sources.items():
            if key in self._lanes:
                self._lanes[key].told(now, **said.news._asdict())
        self._dispatcher.look_again()

    async def _do_without(self, problem: KeeperError) -> None:
        assert self._dispatcher is not None
        now = self._dispatcher.now()
        if isinstance(problem, KeeperLost):
            self.member.absent(now)
            if self._ending is not None:
                self._ending.cancel()
                self._ending = asyncio.get_running_loop().call_at(self.member.valid_until, self._end)
        _log.log(
            logging.WARNING if self.member.boot else logging.INFO,
            "%s; its shares of the limits are kept for %.0f s more",
            problem,
            max(0.0, self.member.valid_until - now),
        )
        if now - self._answered_at >= SILENT_AFTER_S:
            _log.error("the quota keeper has not answered for %.0f s; it is ended and started anew", SILENT_AFTER_S)
            await self._channel.end_keeper()
            self._answered_at = now

    def _end(self) -> None:
        """The shares have ended: send nothing more, and call back what counts for somebody else now."""
        assert self._dispatcher is not None
        now = self._dispatcher.now()
        if self.member.expire(now):
            _log.error(
                "the quota keeper gave no sign of life for %g s: nothing is sent to sources with limits until it does",
                TTL_S,
            )
            for lane in self._lanes.values():
                assert isinstance(lane.quota, SharedQuota)
                if limits := lane.quota.limits():
                    self._dispatcher.call_back(lane, sent="concurrency" in limits)

    async def _wait_until(self, moment: float) -> None:
        assert self._dispatcher is not None
        left_s = moment - self._dispatcher.now()
        if left_s > 0:
            await asyncio.sleep(left_s)

    def _demand(self, lane: Lane) -> Demand:
        assert self._dispatcher is not None
        return Demand(*self._dispatcher.waiting_for(lane))

    def _news(self, key: str, lane: Lane, now: float) -> SourceNews:
        rest_s = lane.breaker.rest_s(now)
        recovered = key in self._rested and lane.breaker.closed
        (self._rested.discard if lane.breaker.closed else self._rested.add)(key)
        return SourceNews(lane.pauses.left_s(now), rest_s, recovered, lane.speed.typical)


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("sharing limits has ended; nothing is sent to sources with limits", exc_info=task.exception())


__all__ = ["Channel", "Membership"]
