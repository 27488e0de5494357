"""The calls of one accelerated function in one event loop: its keys, each with limits of its own, and its counts.

The first call binds it to the running event loop. When that loop is closed, the next call binds it to another one. The
limits and what was learned are kept, because the calls still count.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConfigurationError, EngineError, Mistake
from ..observers import AttemptEnded, AttemptStarted, CallEnded, Observers, Statistics, with_names
from ..observers.batch_report import percentile
from ..observers.events import AttemptResult
from ..quotas.pauses import Breaker
from ..quotas.quota import Quota
from ..quotas.shared import SharedQuota
from ..samples.spent import NO_USAGE
from ..sharing.membership import OpenedChannel, open_channel
from ..sources.function import processors
from ..system.ray_actors import missing_ray, ray_is_up
from .call import FAILED, Attempt, Call, Raised
from .limiter import ANY_NUMBER, Limiter
from .options import Kind, Options
from .runner import MOST_THREADS, FunctionRunner, loader_of

END_WITHIN_S = 2.0
"""Most seconds for which a cancelled call waits for its attempts."""
THREADS = 32
"""Most threads of a sync function, by default."""
MOST_LEARNED = 1024
"""Most calls at once of an adaptive function without `concurrency`."""
IDLE_S = 600.0
"""Seconds after its last call for which a key is kept, but not before its rate allows a whole burst again."""
_LOOKED_AT = 4
RECENT = 4096
"""Answered attempts whose latencies are kept."""


@dataclass(kw_only=True)
class FunctionStatistics:
    """One function so far, over all keys. Latencies are seconds of the last answered attempts; NaN before the first.

    `calls` = `answered` + the sum of `failed` + those `under_way`. A call that returned its default counts as failed.
    """

    name: str
    calls: int = 0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Failed calls by reason: `failed` (by its last error), `deadline`, `circuit_open`, `cancelled`, `closed`."""
    attempts: int = 0
    retries: int = 0
    hedges: int = 0
    in_flight: int = 0
    """Attempts that run now."""
    concurrency: int | None = None
    """Most attempts at once now, of all keys together; None: any number."""
    keys: int = 0
    latency_p50_s: float = math.nan
    latency_p95_s: float = math.nan

    @property
    def under_way(self) -> int:
        return self.calls - self.answered - self.failed.total()


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
        self._observers = Observers(Statistics(), theirs=with_names(options.observers))
        self._so_far = FunctionStatistics(name=self.name)
        self._latencies_s: deque[float] = deque(maxlen=RECENT)
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
        self._so_far.calls += 1
        try:
            limiter = self._limiter(args[skip:], kwargs, loop.time())
        except Exception:
            self._so_far.failed[FAILED] += 1
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

    # Counts

    def attempt_started(self, attempt: Attempt, in_flight: int) -> None:
        """Count an attempt. `in_flight`: those that are under way at its key, with it."""
        self._so_far.attempts += 1
        self._so_far.hedges += attempt.hedge
        self._so_far.retries += attempt.number > 0 and not attempt.hedge
        if self._observers.watched:
            at, number, call, name = attempt.started_at, attempt.number, attempt.call.number, self.name
            started = AttemptStarted(at, call, number, name, name, attempt.hedge, in_flight)
            self._observers.emit(started)

    def attempt_ended(self, attempt: Attempt, result: AttemptResult, now: float, detail: str = "") -> None:
        """Count the end of an attempt. `detail`: what went wrong."""
        seconds, call = now - attempt.started_at, attempt.call
        if result == "answered":
            self._latencies_s.append(seconds)
        if self._observers.watched:
            ended = AttemptEnded(
                now, call.number, attempt.number, self.name, self.name, result, seconds, NO_USAGE, 0.0,
                attempt.timed_out, call.over, detail,
            )  # fmt: skip
            self._observers.emit(ended)

    def call_ended(self, call: int, reason: str, size: float, waited_s: float, attempts: int, now: float) -> None:
        """Count the end of a call. `reason`: why it failed; "": it did not."""
        if reason:
            self._so_far.failed[reason] += 1
        else:
            self._so_far.answered += 1
        if self._observers.watched:
            source = self.name if attempts else ""
            self._observers.emit(CallEnded(now, call, self.name, source, reason, int(size), waited_s, attempts))

    def statistics(self) -> FunctionStatistics:
        """The counts so far."""
        limiters = list(self._keys.values())
        most = sum(limiter.quota.concurrency for limiter in limiters)
        p50_s, p95_s = (percentile(self._latencies_s, share) for share in (0.5, 0.95))
        return replace(
            self._so_far,
            failed=self._so_far.failed.copy(),
            in_flight=sum(len(limiter.live) for limiter in limiters),
            concurrency=most if most < ANY_NUMBER else None,
            keys=len(limiters),
            latency_p50_s=p50_s,
            latency_p95_s=p95_s,
        )

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
        breaker = Breaker(failures_to_open=options.breaker or math.inf, pace_s=options.recovery_s)
        limiter = Limiter(self.name, quota, breaker, most_errors=options.adaptive)
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
