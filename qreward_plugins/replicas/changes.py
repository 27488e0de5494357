"""Defines `Changes`: the updates, sleeps and wake-ups of one pool, one at a time.

An update drains a replica, pauses it, loads the weights, resets the prefix cache, and lets the replica take calls
again. If a step fails, the replica is started again with the weights of the pool. These are the new ones as soon as one
replica has them, and the earlier ones before that.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field

from ..system.threads import in_thread
from .control import ServerFailed
from .pool import ChangeFailed, Pool, Update, Weights, change_failure
from .server import checkpoint_files

_log = logging.getLogger("qreward_plugins.replicas")


class Changes:
    """Updates, puts to sleep and wakes one pool. A second change waits for the first."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lock = asyncio.Lock()
        self._asleep = pool.starts_asleep

    async def update(self, update: Update, token: str = "") -> Weights:
        """Update the weights of all replicas, and return the new weights. `token` names the update in
        `Pool.receiving`.

        If it is cancelled, replicas that were being loaded are started again. Raises `ChangeFailed`.
        """
        async with self._lock:
            if self._asleep:
                raise ChangeFailed("servers that sleep get no other weights; wake them first")
            new = await self._checked(update)
            return await _WeightUpdate(self._pool, update, new, token).run()

    async def _checked(self, update: Update) -> Weights:
        """Return the new weights, after all checks that need no replica to stop."""
        pool, spec = self._pool, self._pool.spec
        revision = pool.weights.revision + 1
        if not update.path:
            if not spec.in_place:
                problem = "weights from memory need servers that load them while they run"
                raise ChangeFailed(f"{problem}; set `weight_updates: in_place`")
            if update.begin and len(update.begin) != spec.topology.data_parallel:
                problem = f"`begin` has {len(update.begin)} bodies for {spec.topology.data_parallel} replicas"
                raise ChangeFailed(problem)
            return Weights(update.version, secrets.token_hex(16), revision=revision)
        found: dict[str, int] = {}
        try:
            for number in (state.number for state in pool.states if state.url):
                found.setdefault(await pool.servers[number].call("check", path=update.path), number)
            if not found:  # no server runs
                found[await in_thread(lambda: checkpoint_files(update.path, folder=spec.in_place))] = 0
        except ServerFailed as error:
            raise ChangeFailed(f"{error.problem}; nothing was changed") from None
        if len(found) > 1:
            first, second = sorted(found.values())[:2]
            problem = f"replicas {first} and {second} find different files at {update.path}; nothing was changed"
            raise ChangeFailed(problem, replicas=sorted(found.values()))
        (files,) = found
        return Weights(update.version or files[:12], files, update.path, revision)

    async def sleep(self, within_s: float = 600.0) -> None:
        """Free the devices of all replicas, until `wake`. Idempotent. Calls under way have `within_s` seconds to end.
        A server that fails to sleep is stopped.
        """
        async with self._lock:
            if self._asleep:
                return
            pool = self._pool
            up = [state.number for state in pool.states if state.state in ("up", "stale")]
            self._asleep = True
            # Those that are starting must not take calls meanwhile.
            await pool.leave_alone(range(len(pool.states)))
            await pool.drain(up, within_s=within_s)
            await asyncio.gather(*(self._to_sleep(state.number, state.number in up) for state in pool.states))

    async def _to_sleep(self, number: int, runs: bool) -> None:
        pool = self._pool
        server = pool.servers[number]
        if runs and pool.spec.sleep_mode:
            try:
                await server.call("sleep")
            except ServerFailed as error:
                _log.warning("replica %d of %s: %s; it is stopped instead", number, pool.spec.name, error.problem)
            else:
                pool.set(number, "asleep", problem="")
                return
        await server.stop()
        pool.set(number, "asleep", url="", problem="")

    async def wake(self) -> None:
        """Let all replicas take calls again. Idempotent. Replicas that cannot be woken are started again. Raises
        `ChangeFailed` with those that could not be started either.
        """
        async with self._lock:
            if not self._asleep:
                return
            numbers = [state.number for state in self._pool.states]
            results = await asyncio.gather(*map(self._to_wake, numbers))
            self._asleep = False
            failed = {number: error for number, error in zip(numbers, results, strict=True) if error is not None}
            if failed:
                raise change_failure(failed, "they are started again")

    async def _to_wake(self, number: int) -> ServerFailed | None:
        pool = self._pool
        url, failed = pool.states[number].url, None
        if url:
            try:
                if pool.has.get(number) != pool.weights:
                    raise ServerFailed("it does not have the weights, which came from memory")
                await pool.servers[number].call("wake")
                pool.ready(number, pool.weights, url)
            except ServerFailed as error:
                _log.warning("replica %d of %s: %s; it is started again", number, pool.spec.name, error.problem)
                await pool.servers[number].stop()
                failed = await pool.try_to_start(number)
                if failed is not None:  # most likely for the same reason, which the wake-up may say better
                    failed = ServerFailed(f"{error.problem}; started again, {failed.problem}", failed.log)
        else:
            failed = await pool.try_to_start(number)
        pool.supervise(number, failed)
        return failed


@dataclass
class _WeightUpdate:
    """Gives the weights `_new` to all replicas of a pool, once."""

    _pool: Pool
    _update: Update
    _new: Weights
    _token: str
    _failed: dict[int, ServerFailed] = field(default_factory=dict)

    async def run(self) -> Weights:
        """Update all replicas, and return the new weights."""
        pool = self._pool
        numbers = [state.number for state in pool.states if state.state in ("up", "stale")]
        # One that is started again takes no calls with the earlier weights until it is known which ones are kept.
        pool.may_open.clear()
        try:
            for some in [numbers] if self._update.mode == "together" else [[number] for number in numbers]:
                await self._renew(some)
                if self._failed and pool.weights != self._new:
                    break  # the next replica would fail, too
            if self._update.path and not self._failed:
                pool.weights = self._new  # also if no replica is up: they are started with them
        finally:
            self._tidy()
            pool.may_open.set()
        renewed = pool.weights == self._new
        if self._failed:
            then = f"the others serve version {self._new.version}, and it is started again for it"
            raise change_failure(self._failed, then if renewed else "the pool goes on with its earlier weights")
        if not renewed:
            raise ChangeFailed("no replica is up")
        return self._new

    async def _renew(self, numbers: list[int]) -> None:
        """Give these replicas the new weights at the same time."""
        pool, update = self._pool, self._update
        # Meanwhile, one may have been started again with the new weights.
        numbers = [
            number
            for number in numbers
            if pool.states[number].state in ("up", "stale") and pool.has.get(number) != self._new
        ]
        if not numbers:
            return
        # A replica that dies from now on fails the next operation. Supervision must not start it again meanwhile: no
        # engine would then report that its calls have ended.
        await pool.leave_alone(numbers)
        await pool.drain(numbers, within_s=update.within_s)
        for number in numbers:
            pool.set(number, "updating")
        if pool.spec.in_place:
            await asyncio.gather(*map(self._pause, numbers))
            if self._failed and not update.path:
                return  # those that receive would wait for those that do not
            numbers = [number for number in numbers if number not in self._failed]
            if not update.path:
                pool.receive(self._token, numbers)
        await asyncio.gather(*map(self._exchange, numbers))

    async def _pause(self, number: int) -> None:
        try:
            await self._pool.servers[number].call("pause", within_s=self._update.within_s)
        except ServerFailed as error:
            self._failed[number] = error

    async def _exchange(self, number: int) -> None:
        pool, update = self._pool, self._update
        server = pool.servers[number]
        try:
            if not pool.spec.in_place:
                await server.stop()
                pool.set(number, "updating", url="")
                if (failed := await pool.try_to_start(number, self._new)) is not None:
                    raise failed
            else:
                if update.path:
                    await server.call("load", path=update.path)
                else:
                    begin = update.begin[number] if update.begin else None
                    await server.call("receive", begin=begin, bodies=update.receive, version=update.version)
                await server.call("resume")
                pool.ready(number, self._new, pool.states[number].url)
        except ServerFailed as error:
            self._failed[number] = error
            return
        pool.weights = self._new
        if update.mode == "rolling":
            pool.may_open.set()
        pool.supervise(number)

    def _tidy(self) -> None:
        """Return the replicas that did not get the new weights to service, also after a cancellation."""
        pool = self._pool
        renewed = pool.weights == self._new
        for state in pool.states:
            number = state.number
            if state.state in ("up", "stale", "down"):
                pool.keep(number)
            elif state.state == "draining" and not renewed:
                pool.ready(number, pool.has[number], state.url)
                pool.keep(number)
            elif state.state in ("draining", "updating"):
                # Its weights are not known, or not those of the others.
                pool.supervise(number, self._failed.get(number) or ServerFailed("the update was cancelled"))
            elif state.state == "failed" and renewed:
                # It ended too often with the earlier weights.
                pool.supervise(number, ServerFailed("it is started again with other weights"))
