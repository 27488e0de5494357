"""Defines `Changes`: the updates, sleeps and wake-ups of one pool, one at a time.

An update drains a replica, pauses it, loads the weights, resets the prefix cache, checks that the update took, and lets
the replica take calls again. If a step fails, the replica is started again with the weights of the pool. These are the
new ones as soon as one replica has them, and the earlier ones before that.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..system.threads import in_thread
from .control import ServerFailed
from .pool import ChangeFailed, Pool, change_failure
from .weights import Drain, Update, Weights, checkpoint_files

_log = logging.getLogger("qreward_plugins.replicas")


class Changes:
    """Updates, puts to sleep and wakes one pool. A second change waits for the first."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lock = asyncio.Lock()
        self._asleep = pool.starts_asleep
        self._discarded: set[int] = set()
        """Replicas whose sleep has discarded their weights."""

    async def update(self, update: Update, on_receiving: Callable[[list[int]], None] = lambda numbers: None) -> Weights:
        """Update the weights of all replicas, and return the new weights. A pool that sleeps loads a checkpoint when it
        wakes. `on_receiving` is called with the numbers of the replicas that begin to receive tensors from memory.

        If it is cancelled, replicas that were being loaded are started again. Raises `ChangeFailed`.
        """
        async with self._lock:
            new = await self._checked(update)
            if self._asleep:
                # Another program uses the devices now. `wake` loads the weights.
                self._pool.weights = new
                return new
            return await _WeightUpdate(self._pool, update, new, on_receiving).run()

    async def _checked(self, update: Update) -> Weights:
        """Return the new weights, after all checks that need no replica to stop."""
        pool, spec = self._pool, self._pool.spec
        revision = pool.weights.revision + 1
        if not update.path:
            if not spec.in_place:
                problem = "weights from memory need servers that load them while they run"
                raise ChangeFailed(f"{problem}; set `weight_updates: in_place`")
            if self._asleep:
                raise ChangeFailed("servers that sleep receive no weights from memory; wake them first")
            if update.begin and len(update.begin) != spec.topology.data_parallel:
                problem = f"`begin` has {len(update.begin)} bodies for {spec.topology.data_parallel} replicas"
                raise ChangeFailed(problem)
            return Weights(update.version, secrets.token_hex(16), in_place=True, revision=revision)
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
        return Weights(update.version or files[:12], files, update.path, files, spec.in_place, revision)

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
                remedy = "Wait longer (`within_s`), or use `drain: abort`"
                if drain == "abort":
                    remedy = "These calls were cancelled, so a process that uses the servers hangs; end it"
                raise ChangeFailed(f"{problem}. {remedy}", replicas=late)
            self._asleep = True
            self._discarded.clear()
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
        failed: ServerFailed | None = None
        if pool.states[number].url:
            try:
                await self._wake_server(number)
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

    async def _wake_server(self, number: int) -> None:
        pool, weights = self._pool, self._pool.weights
        server = pool.servers[number]
        current = pool.has.get(number, Weights()).revision == weights.revision
        if current and number not in self._discarded:
            await server.call("wake", part="all")
        elif weights.from_memory:
            raise ServerFailed("it does not have the weights, which came from memory")
        elif not (current or weights.in_place):
            raise ServerFailed("it is to be started with other weights")
        else:
            await server.call("wake", part="weights")
            # Weights in a folder are loaded from there; a name of the hub is known to the server.
            await server.call("load", path=weights.path or pool.spec.model, version=weights.version)
            await server.call("wake", part="kv_cache")
        pool.opened(number, weights, pool.states[number].url)


@dataclass
class _WeightUpdate:
    """Gives the weights `_new` to all replicas of a pool, once."""

    _pool: Pool
    _update: Update
    _new: Weights
    _on_receiving: Callable[[list[int]], None]
    _first: int | None = None
    """The first replica that has the new weights."""
    _touched: set[int] = field(default_factory=set)
    _failed: dict[int, ServerFailed] = field(default_factory=dict)

    async def run(self) -> Weights:
        """Update all replicas, and return the new weights."""
        pool = self._pool
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
                for some in [numbers] if together else [[number] for number in numbers]:
                    await self._renew(some)
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
        if not self._failed:
            return self._new
        then = f"the others serve version {self._new.version}, and it is started again for it"
        raise change_failure(self._failed, "the pool goes on with its earlier weights" if self._first is None else then)

    async def _renew(self, numbers: list[int]) -> None:
        """Give these replicas the new weights at the same time."""
        pool, update = self._pool, self._update
        serving = [number for number in numbers if pool.states[number].state == "up"]
        numbers = [number for number in numbers if pool.states[number].state in ("up", "stale")]
        # A replica that dies from now on fails the next operation. Supervision must not start it again meanwhile: no
        # engine would then report that its calls have ended.
        await pool.leave_alone(numbers)
        late = await pool.drain(serving, abort=update.drain == "abort", within_s=update.within_s)
        for number in late:
            self._failed[number] = ServerFailed(f"its calls did not end within {update.within_s:g} s")
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
                await self._load(number)
                await server.call("resume")
            except ServerFailed as error:
                self._failed[number] = error
                return
            pool.opened(number, self._new, pool.states[number].url)
        pool.weights = self._new
        self._touched.discard(number)
        pool.supervise(number)

    async def _load(self, number: int) -> None:
        update, server = self._update, self._pool.servers[number]
        if update.path:
            identity = await server.call("load", path=update.path, version=self._new.version)
        else:
            begin = update.begin[number] if update.begin else None
            identity = await server.call("receive", begin=begin, bodies=update.receive, version=self._new.version)
        if self._first is None:
            self._first = number
            self._new = replace(self._new, identity=identity or self._new.identity)
        elif identity and identity != self._new.identity:
            raise ServerFailed(f"its weights are not those of replica {self._first}, by the checksum of the server")

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


def _named(numbers: Sequence[int]) -> str:
    return ("replica " if len(numbers) == 1 else "replicas ") + ", ".join(map(str, sorted(numbers)))
