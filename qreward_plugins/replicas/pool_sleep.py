"""Defines `PoolSleep`: lets a pool free its devices, and wakes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from .launch import ServerFailed
from .pool import ChangeFailed, Pool, Server, change_failure
from .weights import Drain, Weights

_log = logging.getLogger("qreward_plugins.replicas")


class PoolSleep:
    """The sleep of one pool: whether it sleeps, and what each server has lost by it. One change at a time uses it
    (`Changes`).
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.asleep = pool.starts_asleep
        self._discarded: set[int] = set()
        """Replicas whose sleep has discarded their weights."""
        self._half_awake: set[int] = set()
        """Replicas that sleep, but have allocated the memory of their weights."""

    async def sleep(self, *, level: int = 1, drain: Drain = "wait", within_s: float = 600.0) -> None:
        """Free the devices of all replicas, until `wake`. Idempotent. `level` is that of vLLM: 1 keeps the weights in
        main memory, 2 discards them. A server that fails to sleep is stopped.

        Raises `ChangeFailed` if calls do not end within `within_s` seconds; the replicas take calls again then.
        """
        if self.asleep:
            return
        pool = self._pool
        up = [state.number for state in pool.states if state.state in ("up", "stale")]
        serving = [number for number in up if pool.states[number].state == "up"]
        # Those that are starting must not take calls meanwhile.
        try:
            await pool.leave_alone(range(len(pool.states)))
            late = await pool.drain(serving, abort=drain == "abort", within_s=within_s)
        except BaseException:
            self._stay_awake(up)
            raise
        if late:
            self._stay_awake(up)
            problem = f"{_named(late)}: calls did not end within {within_s:g} s; the pool does not sleep"
            remedy = "Wait longer (`within_s`), or use `drain: abort`"
            if drain == "abort":
                remedy = "These calls were cancelled, so a process that uses the servers hangs; end it"
            raise ChangeFailed(f"{problem}. {remedy}", replicas=late)
        self.asleep = True
        self._discarded.clear()
        self._half_awake.clear()
        await asyncio.gather(*(self._to_sleep(state.number, level, state.number in up) for state in pool.states))

    def _stay_awake(self, up: Sequence[int]) -> None:
        """Let all go on as before. `up`: those that ran when the sleep was to begin."""
        pool = self._pool
        for state in pool.states:
            if state.number not in up and state.state in ("starting", "down"):
                pool.supervise(state.number, ServerFailed(state.problem or "its start was interrupted"))
            elif state.state in ("up", "stale"):
                pool.keep(state.number)
        pool.resume(up, paused=False)

    async def _to_sleep(self, number: int, level: int, runs: bool) -> None:
        pool = self._pool
        server = pool.servers[number]
        if runs and pool.spec.sleep_mode:
            try:
                await server.call("sleep", level=level)
            except ServerFailed as error:
                _log.warning("replica %d of %s: %s; it is stopped instead", number, pool.spec.name, error.problem)
            else:
                if level > 1:
                    self._discarded.add(number)
                pool.set(number, "asleep", problem="")
                return
        await server.stop()
        pool.set(number, "asleep", url="", problem="")

    async def wake(self) -> None:
        """Let all replicas take calls again, with the weights of the pool. Idempotent. Replicas that cannot be woken
        are started again. Raises `ChangeFailed` with those that could not be started either.
        """
        if not self.asleep:
            return
        numbers = [state.number for state in self._pool.states]
        results = await asyncio.gather(*map(self._to_wake, numbers))
        self.asleep = False
        failed = {number: error for number, error in zip(numbers, results, strict=True) if error is not None}
        if failed:
            raise change_failure(failed, "they are started again")

    async def _to_wake(self, number: int) -> ServerFailed | None:
        pool = self._pool
        weights = pool.weights
        failed: ServerFailed | None = None
        if pool.states[number].url:
            server = pool.servers[number]
            try:
                await self._wake_server(number, server, weights)
            except ServerFailed as error:
                _log.warning("replica %d of %s: %s; it is started again", number, pool.spec.name, error.problem)
                await server.stop()
                failed = await pool.try_to_start(number)
        else:
            failed = await pool.try_to_start(number)
        pool.supervise(number, failed)
        return failed

    async def _wake_server(self, number: int, server: Server, weights: Weights) -> None:
        pool = self._pool
        current, half = pool.has.get(number, Weights()).revision == weights.revision, number in self._half_awake
        if current and number not in self._discarded:
            await server.call("wake", part="kv_cache" if half else "all")
        elif weights.from_memory:
            raise ServerFailed("it does not have the weights, which came from memory")
        elif not (current or weights.in_place):
            raise ServerFailed("it is to be started with other weights")
        else:
            if not half:
                await server.call("wake", part="weights")
            # Weights in a folder are loaded from there; a name of the hub is known to the server.
            await server.call("load", path=weights.path or pool.spec.model, version=weights.version, before="")
            await server.call("wake", part="kv_cache")
        pool.opened(number, weights, pool.states[number].url)

    async def wake_half(self, number: int) -> None:
        """Let a sleeping replica allocate the memory of its weights. Raises `ServerFailed`."""
        if number not in self._half_awake:
            await self._pool.servers[number].call("wake", part="weights")
            self._half_awake.add(number)

    def received(self, number: int) -> None:
        """Note that a sleeping replica has received weights."""
        self._discarded.discard(number)


def _named(numbers: Sequence[int]) -> str:
    return ("replica " if len(numbers) == 1 else "replicas ") + ", ".join(map(str, sorted(numbers)))
