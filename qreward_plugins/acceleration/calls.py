"""The calls of one accelerated function in one event loop: its keys, each with limits of its own.

The first call binds it to the running event loop. When that loop is closed, the next call binds it to another one. The
limits and what was learned are kept, because the calls still count.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError, EngineError, Mistake
from ..observers import Observers, with_names
from ..quotas.quota import Quota
from ..quotas.shared import SharedQuota
from ..scheduling.breaker import Breaker
from ..sharing.membership import OpenedChannel, open_channel
from ..sources.function import processors
from ..system.ray_actors import missing_ray, ray_is_up
from .call import FAILED, Call, Raised
from .limiter import ANY_NUMBER, ErrorShare, Limiter
from .options import Kind, Options
from .runner import MOST_THREADS, FunctionRunner, loader_of
from .statistics import FunctionStatistics, Tally

END_WITHIN_S = 2.0
"""Most seconds for which a cancelled call waits for its attempts."""
THREADS = 32
"""Most threads of a sync function, by default."""
MOST_LEARNED = 1024
"""Most calls at once of an adaptive function without `concurrency`."""
IDLE_S = 600.0
"""Seconds after its last call for which a key is kept, but not before its rate allows a whole burst again."""
_LOOKED_AT = 4


class FunctionCalls:
    """The calls of one function. `options` are those of the function as a whole; each call has its own."""

    def __init__(self, function: Callable[..., Any], kind: Kind, options: Options) -> None:
        self.function = function
        self.kind = kind
        self.name: str = options.name or getattr(function, "__qualname__", None) or type(function).__qualname__
        self._options = options
        self._limits = options.limits
        self._places = _places(kind, options)
        loader = loader_of(function) if options.mode == "process" else None
        self.run = FunctionRunner(self.name, function, kind, loader=loader, slots=self._places)
        self._observers = Observers(theirs=with_names(options.observers))
        self.tally = Tally(self.name, self._observers)
        self.rng = random.Random(options.seed)
        self._keys: OrderedDict[object, Limiter] = OrderedDict()
        self._sequence = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: OpenedChannel | None = None
        self.closed = False

    # Calls

    def pending(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        *,
        on_end: Callable[[Any], None],
        skip: int = 0,
        batch: int | None = None,
    ) -> Call:
        """Make a call, which `submit` has to follow. `on_end` is called with its value, or `Raised`; not if it is
        cancelled. `skip`: arguments that `key` does not get (`self`). `batch`: the number of the batch that it belongs
        to. Raises what `key` raises.
        """
        loop = self.bind()
        self.tally.so_far.calls += 1
        try:
            limiter = self._limiter(args[skip:], kwargs, loop.time())
        except Exception:
            self.tally.so_far.failed[FAILED] += 1
            raise
        number, size = next(self._sequence), size_of(args[skip:], kwargs)
        return Call(self, limiter, number, args, kwargs, options, size=size, batch=batch, on_end=on_end)

    def submit(self, calls: Sequence[Call]) -> None:
        """Start the calls, the first ones by rank. Some may be over after this."""
        for each in calls:
            each.submit()
        for limiter in {each.limiter: None for each in calls}:
            limiter.go_soon()

    async def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options, *, skip: int = 0) -> Any:
        """Make a call; return its value, or `Raised`. Cancelling it cancels its attempts."""
        result = asyncio.get_running_loop().create_future()

        def ended(value: Any) -> None:
            # Not `set_exception`: a future refuses StopIteration, and logs an exception that is never read.
            if not result.done():
                result.set_result(value)

        try:
            pending = self.pending(args, kwargs, options, on_end=ended, skip=skip)
        except Exception as error:
            return Raised(error, refused=True)
        self.submit([pending])
        try:
            return await result
        except asyncio.CancelledError:
            await drop([pending])
            raise

    async def call_all(
        self,
        arguments: Iterable[tuple[Any, ...]],
        kwargs: Mapping[str, Any],
        options: Options,
        *,
        skip: int = 0,
        stop_at_error: bool = False,
    ) -> list[Any]:
        """Make many calls as one batch; return the values, or `Raised`, in order. With `stop_at_error`, the others are
        cancelled when one has failed, and the list has only this `Raised`.
        """
        batch = next(self._sequence)
        calls: list[Call | Raised] = []
        left = 1  # the submission itself
        over: asyncio.Future[Raised | None] = self.bind().create_future()

        def ended(result: Any) -> None:
            nonlocal left
            left -= 1
            if not over.done():
                if stop_at_error and type(result) is Raised:
                    over.set_result(result)
                elif not left:
                    over.set_result(None)

        try:
            for args in arguments:
                left += 1
                try:
                    calls.append(self.pending(args, kwargs, options, on_end=ended, skip=skip, batch=batch))
                except Exception as error:
                    calls.append(Raised(error, refused=True))
                    ended(calls[-1])
                    if stop_at_error:
                        break
            self.submit([each for each in calls if isinstance(each, Call)])
            ended(None)
            if (failed := await over) is not None:
                return [failed]
            return [each if isinstance(each, Raised) else each.result for each in calls]
        finally:
            over.cancel()
            await drop([each for each in calls if isinstance(each, Call)])

    def statistics(self) -> FunctionStatistics:
        """The counts so far."""
        limiters, found = list(self._keys.values()), self.tally.statistics()
        most = sum(limiter.quota.concurrency for limiter in limiters)
        found.in_flight, found.keys = sum(len(limiter.live) for limiter in limiters), len(limiters)
        found.concurrency = most if most < ANY_NUMBER else None
        return found

    # The event loop, keys and limits

    def bind(self) -> asyncio.AbstractEventLoop:
        """Return the running event loop, and serve it. Raises `EngineError` if it is closed, or serves another one."""
        if self.closed:
            raise EngineError(f"{self.name} is closed; decorate the function again")
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return loop
        earlier, waiting = self._loop, any(limiter.calls for limiter in self._keys.values())
        if earlier is not None and not earlier.is_closed() and (earlier.is_running() or waiting):
            raise EngineError(
                f"{self.name} serves another event loop that is still open; await its `aclose()` there first, or "
                "decorate the function once for each loop"
            )
        self._loop = loop
        # The channel of an earlier loop serves this one, too.
        self._channel = self._channel or self._open_channel()
        for key, limiter in self._keys.items():
            limiter.bind(self._channel, self._channel_key(key))
        return loop

    async def aclose(self) -> None:
        """Fail all calls, end their attempts and the worker processes. Idempotent."""
        self.closed = True
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            await asyncio.gather(*(limiter.aclose(END_WITHIN_S) for limiter in self._keys.values()))
        if self._channel is not None:
            await self._channel.aclose()
        await self.run.aclose()
        self._observers.close(loop.time())
        self._keys.clear()

    def _limiter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], now: float) -> Limiter:
        key_of = self._options.key
        key = None if key_of is None else key_of(*args, **kwargs)
        keys = self._keys
        try:
            limiter = keys.get(key)
        except TypeError:
            raise TypeError(f"{self.name}: key returned {type(key).__name__}, which is not hashable") from None
        if limiter is None:
            limiter = keys[key] = self._open(key)
        if key_of is not None:
            keys.move_to_end(key)
            if self._channel is None:
                self._forget_idle(now, limiter)
        limiter.used_at = now
        return limiter

    def _forget_idle(self, now: float, used: Limiter) -> None:
        """Forget keys that are idle. A few of them, in turn, are looked at in each call."""
        limits, idle_s = self._limits, IDLE_S
        if limits.requests_per_minute is not None:
            idle_s = max(idle_s, 2 * limits.window_s, 120.0 / limits.requests_per_minute)
        for _ in range(_LOOKED_AT):
            key, oldest = next(iter(self._keys.items()))
            if oldest is used:
                return
            if oldest.forgettable(now, idle_s):
                del self._keys[key]
            else:
                self._keys.move_to_end(key)

    def _open(self, key: object) -> Limiter:
        options, limits, places = self._options, self._limits, self._places
        quota: Quota
        if self._channel is not None:
            # The number of threads is each process's own; only what the user declared is shared.
            slots = ANY_NUMBER if options.concurrency is not None else places
            quota = SharedQuota(limits, source=self.name, slots=slots, jitter_s=0.0)
        else:
            if places != ANY_NUMBER:
                limits = limits.model_copy(update={"concurrency": places})
            most = None if options.adaptive is None else min(places, MOST_LEARNED)
            any_number = ANY_NUMBER if most is None else None
            quota = Quota(limits, source=self.name, slots=any_number, jitter_s=0.0, most_learned=most)
        breaker = Breaker(failures_to_open=options.breaker or math.inf, recovery_s=options.recovery_s)
        share = None if options.adaptive is None else ErrorShare(options.adaptive)
        limiter = Limiter(self.name, quota, breaker, error_share=share)
        limiter.bind(self._channel, self._channel_key(key))
        return limiter

    def _channel_key(self, key: object) -> str:
        """What shared processes know the limits of a key by. Raises `TypeError` for a key that is no text."""
        if self._channel is None:
            return ""
        if not isinstance(key, (str, type(None))):
            raise TypeError(f"{self.name}: with `shared`, key must return a text, not {type(key).__qualname__}")
        name = f"{getattr(self.function, '__module__', '')}.{self.name}"
        return f"function {_digest(name)}" + ("" if key is None else _digest(key))

    def _open_channel(self) -> OpenedChannel | None:
        shared = self._options.shared
        if shared == "ray" and not ray_is_up():
            remedy = 'Call ray.init() before the first call, or set it to "auto" or "machine".'
            raise ConfigurationError([Mistake("shared", missing_ray(), remedy)], origin="accelerate")
        return open_channel(shared, has_rates=self._limits.requests_per_minute is not None)


async def drop(calls: Sequence[Call]) -> None:
    """End calls whose results are not needed, and wait until their attempts have ended."""
    # All in one step, so that none of them begins meanwhile.
    if tasks := [task for call in calls for task in call.cancel()]:
        await asyncio.wait(tasks, timeout=END_WITHIN_S)


def _places(kind: Kind, options: Options) -> int:
    """Most calls at once in this process: as the options say, or as many as there are threads or processes."""
    in_threads = kind in ("sync", "generator") and options.mode != "process"
    if options.concurrency is not None:
        return min(options.concurrency, MOST_THREADS if in_threads else ANY_NUMBER)
    if options.mode == "process":
        return processors()
    return THREADS if in_threads else ANY_NUMBER


def size_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The length of the texts among the arguments: what a call takes mostly grows with it."""
    return sum(len(each) for each in (*args, *kwargs.values()) if isinstance(each, (str, bytes)))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:16]
