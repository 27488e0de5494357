"""Defines `WeightUpdate`: one update of the weights of a pool.

It drains a replica, pauses it, loads the weights, resets the prefix cache, checks that the update took, and lets it
take calls again. If a step fails, the replica is started again with the weights of the pool. These are the new ones as
soon as one replica has them, and the earlier ones before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .launch import ServerFailed
from .pool import ChangeFailed, Pool, change_failure
from .pool_sleep import PoolSleep
from .weights import Update, Weights


class WeightUpdate:
    """Gives the weights `new` to all replicas of a pool, once. `on_receiving` is called with the numbers of those that
    begin to receive tensors.
    """

    def __init__(
        self,
        pool: Pool,
        sleep: PoolSleep,
        update: Update,
        new: Weights,
        on_receiving: Callable[[list[int]], None],
    ) -> None:
        self._pool = pool
        self._sleep = sleep
        self._update = update
        self._new = new
        self._on_receiving = on_receiving
        self._first: int | None = None
        """The first replica that has the new weights."""
        self._touched: set[int] = set()
        self._kept: set[int] = set()
        """Those that go on with the earlier weights, although others have the new ones."""
        self._failed: dict[int, ServerFailed] = {}

    async def run(self) -> Weights:
        """Update all replicas, and return the new weights.

        If it is cancelled, replicas that were being loaded are started again. Raises `ChangeFailed`.
        """
        pool = self._pool
        if self._sleep.asleep:
            await self._while_asleep()
            return self._result()
        numbers = [state.number for state in pool.states if state.state in ("up", "stale")]
        if not numbers and not self._update.path:
            raise ChangeFailed("no replica is up")
        if not numbers:
            pool.weights = self._new
            self._revive()
        together = self._update.mode == "together"
        if together:
            pool.may_open.clear()
        try:
            while numbers:
                if together:
                    await self._renew(numbers)
                else:
                    for number in numbers:
                        await self._renew([number])
                        if self._first is None:
                            break  # the next replica would fail, too
                if self._first is None:
                    break
                # Some may have been started again with the earlier weights meanwhile.
                numbers = [
                    state.number
                    for state in pool.states
                    if state.state == "up"
                    and pool.has[state.number].revision != self._new.revision
                    and state.number not in self._failed
                ]
        finally:
            self._tidy()
            pool.may_open.set()
        return self._result()

    async def _renew(self, numbers: list[int]) -> None:
        """Give these replicas the new weights at the same time."""
        pool, update = self._pool, self._update
        serving = [number for number in numbers if pool.states[number].state == "up"]
        numbers = [number for number in numbers if pool.states[number].state in ("up", "stale")]
        # A replica that dies from now on fails the next operation. Supervision must not start it again meanwhile: no
        # engine would then report that its calls have ended.
        await pool.leave_alone(numbers)
        last = update.groups and self._are_last(numbers)
        late = await pool.drain(serving, abort=update.drain == "abort", within_s=update.within_s, last=last)
        what = "its calls, or the groups that its weights judge," if update.groups else "its calls"
        for number in late:
            self._failed[number] = ServerFailed(f"{what} did not end within {update.within_s:g} s")
        if update.groups:
            # Another server would judge the rest of its groups by other weights.
            pool.resume(late, paused=False)
            self._kept.update(late)
        if late and (update.mode == "together" or not update.path):
            return
        numbers = [number for number in numbers if number not in late]
        for number in numbers:
            pool.set(number, "updating")
        if pool.spec.in_place:
            await asyncio.gather(*map(self._pause, numbers))
            if self._failed and not update.path:
                return  # those that receive would wait for those that do not
            numbers = [number for number in numbers if number not in self._failed]
            if not update.path:
                self._on_receiving(numbers)
        await asyncio.gather(*map(self._exchange, numbers))

    def _are_last(self, numbers: list[int]) -> bool:
        """Whether no other replica takes calls with the weights of these."""
        pool = self._pool
        return not any(
            state.state == "up" and state.number not in numbers and pool.has[state.number].revision < self._new.revision
            for state in pool.states
        )

    async def _pause(self, number: int) -> None:
        try:
            await self._pool.servers[number].call("pause", within_s=self._update.within_s)
        except ServerFailed as error:
            self._failed[number] = error

    async def _exchange(self, number: int) -> None:
        pool = self._pool
        server = pool.servers[number]
        self._touched.add(number)
        if not pool.spec.in_place:
            await server.stop()
            pool.set(number, "updating", url="")
            failed = await pool.try_to_start(number, self._new)
            if failed is not None:
                self._failed[number] = failed
                return
            if self._first is None:
                self._first = number
        else:
            try:
                await self._load(number, server)
                await server.call("resume")
            except ServerFailed as error:
                self._failed[number] = error
                return
            pool.opened(number, self._new, pool.states[number].url)
        pool.weights = self._new
        self._touched.discard(number)
        pool.supervise(number)

    async def _load(self, number: int, server: Any) -> None:
        pool, update = self._pool, self._update
        if update.path:
            before = pool.has.get(number, Weights()).path or pool.spec.model
            loaded = await server.call("load", path=update.path, version=self._new.version, before=before)
        else:
            begin = dict(update.begin[number]) if update.begin else None
            bodies = [dict(body) for body in update.receive]
            loaded = await server.call("receive", begin=begin, bodies=bodies, version=self._new.version)
        identity = loaded["identity"]
        if self._first is None:
            self._first = number
            self._new = replace(self._new, identity=identity or self._new.identity)
        elif identity and identity != self._new.identity:
            raise ServerFailed(f"its weights are not those of replica {self._first}, by the checksum of the server")

    async def _while_asleep(self) -> None:
        """Receive weights from memory in servers that sleep. They stay asleep."""
        pool = self._pool
        numbers = [state.number for state in pool.states if state.url]
        for number in numbers:
            try:
                await self._sleep.wake_half(number)
            except ServerFailed as error:
                self._failed[number] = error
        numbers = [number for number in numbers if number not in self._failed]
        if not numbers:
            raise ChangeFailed("no sleeping server can receive weights", replicas=sorted(self._failed))
        self._on_receiving(numbers)
        for number in numbers:
            try:
                await self._load(number, pool.servers[number])
                pool.has[number] = pool.weights = self._new
                self._sleep.received(number)
            except ServerFailed as error:
                self._failed[number] = error
        for number in self._failed:
            await pool.servers[number].stop()
            pool.set(number, "asleep", url="", problem=self._failed[number].problem)

    def _tidy(self) -> None:
        """Return the replicas that did not get the new weights to service, also after a cancellation."""
        pool = self._pool
        for state in pool.states:
            number = state.number
            if state.state in ("up", "stale", "down"):
                pool.keep(number)
            if state.state not in ("draining", "updating"):
                continue
            failed = self._failed.get(number) or ServerFailed("the update of its weights was cancelled")
            if number in self._touched or self._first is not None:
                # Its weights are not known, or not those of the others.
                pool.supervise(number, failed)
            else:
                pool.resume([number], paused=state.state == "updating" and pool.spec.in_place)
        if self._first is not None:
            self._revive()

    def _revive(self) -> None:
        """Start again the replicas that ended too often with the earlier weights."""
        for state in self._pool.states:
            if state.state == "failed":
                self._pool.supervise(state.number, ServerFailed("it is started again with other weights"))

    def _result(self) -> Weights:
        failed = self._failed
        if not failed:
            return self._new
        if self._first is None:
            raise change_failure(failed, "the pool goes on with its earlier weights")
        then = "is started again for it"
        if failed.keys() <= self._kept:
            then = "goes on with the earlier weights. Wait longer (`within_s`)"
        raise change_failure(failed, f"the others serve version {self._new.version}, and it {then}")
