"""Defines `Changes`: updates the weights of a pool, and lets it sleep and wake.

An update drains a replica, pauses it, loads the weights, resets the prefix cache, checks that the update took, and
lets it take calls again. If a step fails, the replica is started again with the weights of the pool. These are the new
ones as soon as one replica has them, and the earlier ones before that.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .control import ControlFailed
from .launch import ServerFailed
from .orders import Orders
from .pool import Pool
from .weights import Drain, Update, Weights

_log = logging.getLogger("qreward_plugins.replicas")


class ChangeFailed(Exception):
    """An update, a sleep or a wake-up of a pool failed. `replicas` are the numbers of the replicas at fault; `log` are
    the last lines of the log of the first one, not redacted.
    """

    def __init__(self, problem: str, *, replicas: Sequence[int] = (), log: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.replicas = tuple(replicas)
        self.log = log


class Changes:
    """Updates, puts to sleep and wakes one pool. A second change waits for the first.

    `token` makes the identity of weights from memory if the server has no checksum.
    """

    def __init__(self, pool: Pool, *, token: Callable[[], str] = lambda: secrets.token_hex(16)) -> None:
        self._pool = pool
        self._token = token
        self._lock = asyncio.Lock()
        self._asleep = pool.starts_asleep
        self._discarded: set[int] = set()
        """Replicas whose sleep has discarded their weights."""
        self._half_awake: set[int] = set()
        """Replicas that sleep, but have allocated the memory of their weights."""

    # Weights

    async def update(self, update: Update, on_receiving: Callable[[list[int]], None] = lambda numbers: None) -> Weights:
        """Update the weights of all replicas, and return the new weights. `on_receiving` is called with the numbers of
        the replicas that begin to receive tensors. A pool that sleeps loads a checkpoint when it wakes.

        If it is cancelled, replicas that were being loaded are started again. Raises `ChangeFailed`.
        """
        async with self._lock:
            new = await self._checked(update)
            if self._asleep and update.path:
                # Another program uses the devices now. `wake` loads the weights.
                self._pool.weights = new
                return new
            return await _Updating(self, self._pool, update, new, on_receiving).run(half_awake=self._asleep)

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
            return Weights(update.version, self._token(), in_place=True, revision=revision)
        found: dict[str, int] = {}
        for state in (state for state in pool.states if state.url):
            try:
                checked = await pool.servers[state.number].tell("check", path=update.path)
            except ServerFailed as error:
                problem = f"replica {state.number}: {error.problem}; nothing was changed"
                raise ChangeFailed(problem, replicas=[state.number]) from None
            found.setdefault(checked["files"], state.number)
        if not found:  # no server runs
            try:
                found[(await Orders(spec, None, "").check(update.path))["files"]] = 0
            except ControlFailed as error:
                raise ChangeFailed(f"{error}; nothing was changed") from None
        if len(found) > 1:
            first, second = sorted(found.values())[:2]
            problem = f"replicas {first} and {second} find different files at {update.path}; nothing was changed"
            raise ChangeFailed(problem, replicas=sorted(found.values()))
        (files,) = found
        return Weights(update.version or files[:12], files, update.path, files, spec.in_place, revision)

    # Sleep

    async def sleep(self, *, level: int = 1, drain: Drain = "wait", within_s: float = 600.0) -> None:
        """Free the devices of all replicas, until `wake`. Idempotent. `level` is that of vLLM: 1 keeps the weights in
        main memory, 2 discards them. A server that fails to sleep is stopped.

        Raises `ChangeFailed` if calls do not end within `within_s` seconds; the replicas take calls again then.
        """
        async with self._lock:
            if self._asleep:
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
                raise ChangeFailed(f"{problem}. Wait longer (`within_s`), or use `drain: abort`", replicas=late)
            self._asleep = True
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
                await server.tell("sleep", level=level)
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
        async with self._lock:
            if not self._asleep:
                return
            numbers = [state.number for state in self._pool.states]
            results = await asyncio.gather(*map(self._to_wake, numbers))
            self._asleep = False
            failed = {number: error for number, error in zip(numbers, results, strict=True) if error is not None}
            if failed:
                raise _failure(failed, "they are started again")

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

    async def _wake_server(self, number: int, server: Any, weights: Weights) -> None:
        pool = self._pool
        current, half = pool.has.get(number, Weights()).revision == weights.revision, number in self._half_awake
        if current and number not in self._discarded:
            await server.tell("wake", part="kv_cache" if half else "all")
        elif weights.from_memory:
            raise ServerFailed("it does not have the weights, which came from memory")
        elif not (current or weights.in_place):
            raise ServerFailed("it is to be started with other weights")
        else:
            if not half:
                await server.tell("wake", part="weights")
            # Weights in a folder are loaded from there; a name of the hub is known to the server.
            await server.tell("load", path=weights.path or pool.spec.model, version=weights.version, before="")
            await server.tell("wake", part="kv_cache")
        pool.opened(number, weights, pool.states[number].url)

    async def wake_half(self, number: int) -> None:
        """Let a sleeping replica allocate the memory of its weights. Raises `ServerFailed`."""
        if number not in self._half_awake:
            await self._pool.servers[number].tell("wake", part="weights")
            self._half_awake.add(number)

    def received(self, number: int) -> None:
        """Note that a sleeping replica has received weights."""
        self._discarded.discard(number)


class _Updating:
    """One update under way."""

    def __init__(
        self, changes: Changes, pool: Pool, update: Update, new: Weights, on_receiving: Callable[[list[int]], None]
    ) -> None:
        self._changes = changes
        self._pool = pool
        self._update = update
        self._new = new
        self._on_receiving = on_receiving
        self._first: int | None = None
        """The first replica that has the new weights."""
        self._touched: set[int] = set()
        self._kept: set[int] = set()
        """Those that go on with the earlier weights, although others have the new ones."""
        self._failed: dict[int, ServerFailed] = {}

    async def run(self, *, half_awake: bool) -> Weights:
        pool = self._pool
        if half_awake:
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
        # A replica that dies from now on fails the next order. Supervision must not start it again meanwhile: no engine
        # would then report that its calls have ended.
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
            await self._pool.servers[number].tell("pause", within_s=self._update.within_s)
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
                await server.tell("resume")
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
            loaded = await server.tell("load", path=update.path, version=self._new.version, before=before)
        else:
            begin = dict(update.begin[number]) if update.begin else None
            bodies = [dict(body) for body in update.receive]
            loaded = await server.tell("receive", begin=begin, bodies=bodies, version=self._new.version)
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
                await self._changes.wake_half(number)
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
                self._changes.received(number)
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
            raise _failure(failed, "the pool goes on with its earlier weights")
        then = "is started again for it"
        if failed.keys() <= self._kept:
            then = "goes on with the earlier weights. Wait longer (`within_s`)"
        raise _failure(failed, f"the others serve version {self._new.version}, and it {then}")


def _failure(failed: dict[int, ServerFailed], then: str) -> ChangeFailed:
    problems = "; ".join(f"replica {number}: {error.problem}" for number, error in sorted(failed.items()))
    log = next((error.log for _, error in sorted(failed.items()) if error.log), "")
    return ChangeFailed(f"{problems}; {then}", replicas=sorted(failed), log=log)


def _named(numbers: Sequence[int]) -> str:
    return ("replica " if len(numbers) == 1 else "replicas ") + ", ".join(map(str, sorted(numbers)))
