"""The calls of one accelerated function in one event loop: its keys, each with limits of its own.

The first call binds it to the running event loop. When that loop is closed, the next call binds it to another one. The
limits and what was learned are kept, because the calls still count.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import math
import os
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from ..config import load_config
from ..errors import ConfigurationError, EngineError, Mistake
from ..observers import Observers, with_names
from ..quotas.quota import Quota
from ..quotas.shared import SharedQuota
from ..scheduling import Breaker
from ..sharing.channels import OpenedChannel, open_channel, source_keys
from ..system.ray_actors import missing_ray, ray_is_up
from .call import FAILED, PendingCall
from .limiter import ErrorShare, Group, Limiter
from .limits import ANY_NUMBER, MOST_LEARNED, FunctionLimits
from .options import Kind, Options
from .raised import Raised
from .runner import FunctionRunner, loader_of
from .statistics import DebugLog, FunctionStatistics, Tally

END_WITHIN_S = 2.0
"""Most seconds for which a cancelled call waits for its attempts."""
KEYS_KEPT = 1024
"""Keys up to which one is kept for `idle_s`. Beyond, it is forgotten as soon as its limits allow a whole burst."""
_LOOKED_AT = 4
_MOST_MEASURED = 32


_process = object()
"""This process: a fork makes another one. `os.getpid` is a system call, and took longer than all else in `bind`."""


def _forked() -> None:
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class FunctionCalls:
    """The calls of one function. `options` are those of the function as a whole; each call has its own."""

    def __init__(self, function: Callable[..., Any], kind: Kind, options: Options) -> None:
        self.function = function
        self.kind = kind
        self.options = options
        self.name: str = options.name or getattr(function, "__qualname__", None) or type(function).__qualname__
        loader = loader_of(function) if options.mode == "process" else None
        self._limits = FunctionLimits(kind, options)
        self._channel_key = _channel_key(options, function)
        self._runner = FunctionRunner(self.name, function, kind, loader=loader, slots=self._limits.places(options))
        debug = [("debug log", DebugLog())] if options.debug else []
        self._observers = Observers(theirs=[*with_names(options.observers), *debug])
        self._tally = Tally(self.name, self._observers)
        self._rng = random.Random(options.seed)
        self._keys: OrderedDict[object, Limiter] = OrderedDict()
        self._sequence = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = _process
        self._channel: OpenedChannel | None = None
        self._forgetting: set[asyncio.Task[None]] = set()
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
        groups: dict[Limiter, Group] | None = None,
    ) -> PendingCall:
        """Make a call, which `submit` has to follow. `on_end` is called with its value, or `Raised`; not if it is
        cancelled. `skip`: arguments that `key` and `size` do not get (`self`). `groups`: those that it joins, one for
        each key; None: it is alone. Raises what `key` and `size` raise.
        """
        loop = self.bind()
        self._tally.calls += 1
        try:
            size = size_of(args[skip:], kwargs) if options.size is None else _size(options.size(*args[skip:], **kwargs))
            limiter = self._limiter(args[skip:], kwargs, loop.time())
        except Exception:
            self._tally.ends[FAILED] += 1
            raise
        number = next(self._sequence)
        if groups is None:
            if not limiter.calls:
                limiter.singles = Group()
            group = limiter.singles
        else:
            group = groups.setdefault(limiter, Group(number))
        return PendingCall(
            args, kwargs, options, size, number=number, group=group, limiter=limiter, runner=self._runner,
            rng=self._rng, tally=self._tally, on_end=on_end,
        )  # fmt: skip

    def submit(self, pending: Sequence[PendingCall]) -> None:
        """Start the calls, the first ones by rank. Some may be over after this."""
        for each in pending:
            each.submit()
        for limiter in {each.limiter: None for each in pending}:
            limiter.go_soon()

    async def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options, *, skip: int = 0) -> Any:
        """Make a call; return its value, or `Raised`. Cancelling it cancels its attempts."""
        result = asyncio.get_running_loop().create_future()
        try:
            pending = self.pending(args, kwargs, options, on_end=setter(result), skip=skip)
        except Exception as error:
            return Raised(error, refused=True)
        self.submit([pending])
        try:
            return await result
        except asyncio.CancelledError:
            await pending.drop(END_WITHIN_S)
            raise

    async def call_all(
        self,
        arguments: Iterable[tuple[Any, ...]],
        kwargs: Mapping[str, Any],
        options: Options,
        *,
        skip: int = 0,
        on_end: Callable[[], None] | None = None,
        stop_at_error: bool = False,
    ) -> list[Any]:
        """Make many calls as one batch; return the values, or `Raised`, in order. With `stop_at_error`, the others are
        cancelled when one has failed, and the list has only this `Raised`.
        """
        groups: dict[Limiter, Group] = {}
        calls: list[PendingCall | Raised] = []
        left = 1  # the submission itself
        over: asyncio.Future[Raised | None] = self.bind().create_future()

        def ended(result: Any) -> None:
            nonlocal left
            left -= 1
            if on_end is not None:
                on_end()
            if not over.done():
                if stop_at_error and type(result) is Raised:
                    over.set_result(result)
                elif not left:
                    over.set_result(None)

        try:
            for args in arguments:
                left += 1
                try:
                    calls.append(self.pending(args, kwargs, options, on_end=ended, skip=skip, groups=groups))
                except Exception as error:
                    calls.append(Raised(error, refused=True))
                    if stop_at_error:
                        break
            self.submit([each for each in calls if isinstance(each, PendingCall)])
            for refused in [each for each in calls if isinstance(each, Raised)]:
                ended(refused)
            left -= 1
            if not left and not over.done():
                over.set_result(None)
            if (failed := await over) is not None:
                return [failed]
            return [each if isinstance(each, Raised) else each.result for each in calls]
        finally:
            over.cancel()
            # All are dropped in one step, so that none of them begins meanwhile.
            if tasks := [task for each in calls if isinstance(each, PendingCall) for task in each.cancel()]:
                await asyncio.wait(tasks, timeout=END_WITHIN_S)

    def defaulted(self) -> None:
        """Count a call that failed and returned its default."""
        self._tally.defaults += 1

    # The event loop, keys and limits

    def bind(self) -> asyncio.AbstractEventLoop:
        """Return the running event loop, and serve it. Raises `EngineError` if it is closed, or serves another one."""
        if self.closed:
            raise EngineError(f"{self.name} is closed; decorate the function again")
        loop = asyncio.get_running_loop()
        if loop is self._loop and self._process is _process:
            return loop
        if self._process is not _process:
            # After a fork the calls and the workers belong to the parent.
            self._process = _process
            self._keys.clear()
            self._runner = self._runner.forked()
        elif self._serves_another():
            raise EngineError(
                f"{self.name} serves another event loop that is still open; await its `aclose()` there first, or "
                "decorate the function once for each loop"
            )
        self._loop = loop
        # The channel of an earlier loop serves this one, too.
        self._channel = self._channel or self._open_channel()
        for key, limiter in self._keys.items():
            limiter.bind(self._channel, self._channel_key_of(key))
        return loop

    def retune(self, options: Options) -> None:
        """Take over new options of the function as a whole. Calls that have started still count."""
        self.options = options
        limits = self._limits.declared(options) if self._channel is not None else self._limits.here(options)
        now = self._loop.time() if self._loop is not None else 0.0
        for limiter in self._keys.values():
            if options.error_share is not None:
                limiter.quota.learn_up_to(min(self._limits.places(options), MOST_LEARNED))
            limiter.quota.retune(limits, now)
            limiter.breaker.retune(options.failures_to_open, options.recovery_s)
            limiter.error_share = None if options.error_share is None else ErrorShare(options.error_share)
            if self._loop is not None and not self._loop.is_closed():
                limiter.go_soon()

    def statistics(self) -> FunctionStatistics:
        """The counts so far."""
        return self._tally.statistics(list(self._keys.values()))

    def window(self, options: Options) -> int:
        """Calls of a stream that are under way at once: enough to keep the function busy."""
        return self._limits.window(options)

    async def aclose(self) -> None:
        """Fail all calls, end their attempts and the worker processes. Idempotent."""
        self.closed = True
        loop = asyncio.get_running_loop()
        if self._process is _process:
            if self._loop is loop:
                await asyncio.gather(*(limiter.aclose(END_WITHIN_S) for limiter in self._keys.values()))
                await asyncio.gather(*self._forgetting, return_exceptions=True)
            if self._channel is not None:
                await self._channel.aclose()
            await self._runner.aclose()
            self._observers.close(loop.time())
        self._keys.clear()

    def _serves_another(self) -> bool:
        """Whether an earlier event loop may go on with calls of this function."""
        if self._loop is None or self._loop.is_closed():
            return False
        return self._loop.is_running() or any(limiter.calls for limiter in self._keys.values())

    def _limiter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], now: float) -> Limiter:
        key = None if self.options.key is None else self.options.key(*args, **kwargs)
        keys = self._keys
        try:
            limiter = keys.get(key)
        except TypeError:
            raise TypeError(f"{self.name}: key returned {type(key).__name__}, which is not hashable") from None
        if limiter is None:
            limiter = keys[key] = self._open(key)
        if self.options.key is not None:
            keys.move_to_end(key)
            self._forget_idle(now, limiter)
        limiter.used_at = now
        return limiter

    def _forget_idle(self, now: float, used: Limiter) -> None:
        """Forget keys that are idle. A few of them, in turn, are looked at in each call."""
        idle_s = max(
            self._limits.refilled_s(self.options), self.options.idle_s if len(self._keys) <= KEYS_KEPT else 0.0
        )
        for _ in range(_LOOKED_AT):
            key, oldest = next(iter(self._keys.items()))
            if oldest is used:
                return
            if not oldest.forgettable(now, idle_s):
                self._keys.move_to_end(key)
                continue
            del self._keys[key]
            if oldest.membership is None:
                continue
            closing = asyncio.get_running_loop().create_task(oldest.aclose(END_WITHIN_S))
            self._forgetting.add(closing)
            closing.add_done_callback(self._forgetting.discard)

    def _open(self, key: object) -> Limiter:
        options = self.options
        quota: Quota
        if self._channel is not None:
            # The number of threads is each process's own; only what the user declared is shared.
            places = ANY_NUMBER if options.concurrency is not None else self._limits.places(options)
            quota = SharedQuota(self._limits.declared(options), source=self.name, slots=places, jitter_s=0.0)
        else:
            most = None if options.error_share is None else min(self._limits.places(options), MOST_LEARNED)
            slots = ANY_NUMBER if most is None else None
            quota = Quota(self._limits.here(options), source=self.name, slots=slots, jitter_s=0.0, most_learned=most)
        breaker = Breaker(failures_to_open=options.failures_to_open, recovery_s=options.recovery_s)
        share = None if options.error_share is None else ErrorShare(options.error_share)
        limiter = Limiter(self.name, quota, breaker, error_share=share, observers=self._observers)
        limiter.bind(self._channel, self._channel_key_of(key))
        return limiter

    def _channel_key_of(self, key: object) -> str:
        if key is None or self._channel is None:
            return self._channel_key
        return self._channel_key + hashlib.sha256(shared_name(key).encode("utf-8", "replace")).hexdigest()[:16]

    def _open_channel(self) -> OpenedChannel | None:
        shared = self.options.shared
        if shared == "ray" and not ray_is_up():
            remedy = 'Call ray.init() before the first call, or set it to "auto" or "machine".'
            raise ConfigurationError([Mistake("shared", missing_ray(), remedy)], origin="accelerate")
        limits = self._limits.declared(self.options)
        return open_channel(shared, has_rates=bool(limits.requests_per_minute or limits.tokens_per_minute))


def size_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """The length of the texts and bytes among the arguments, also in a short list or mapping: what a call takes
    mostly grows with it.
    """
    return sum(map(_length, args)) + (sum(map(_length, kwargs.values())) if kwargs else 0)


def _length(value: Any) -> int:
    kind = type(value)
    if kind is str or kind is bytes:
        return len(value)
    if kind is list or kind is tuple:
        return sum(len(each) for each in value[:_MOST_MEASURED] if type(each) is str or type(each) is bytes)
    if kind is dict and len(value) <= _MOST_MEASURED:
        return sum(len(each) for each in value.values() if type(each) is str or type(each) is bytes)
    return 0


def _size(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"size must return a number, at least 0, not {value!r}")
    return float(value)


def shared_name(key: object) -> str:
    """What all processes know a key by: the same text for equal keys. Raises `TypeError` for a key without one.

    `repr` is no such text: that of an object may hold its address, and that of a set has no fixed order.
    """
    if isinstance(key, str):
        return f"text {str.__str__(key)!r}"
    if isinstance(key, (int, float)):
        return f"number {int(key) if key == key // 1 else float(key)!r}"
    if key is None or isinstance(key, (bytes, UUID, PurePath)):
        return repr(key)
    if isinstance(key, Enum):
        return f"{type(key).__qualname__}.{key.name}"
    if isinstance(key, tuple):
        return f"({','.join(map(shared_name, key))})"
    if isinstance(key, frozenset):
        return f"{{{','.join(sorted(map(shared_name, key)))}}}"
    if is_dataclass(key):
        parts = (shared_name(getattr(key, field.name)) for field in fields(key) if field.compare)
        return f"{type(key).__qualname__}({','.join(parts)})"
    raise TypeError(
        f"key returned {type(key).__qualname__}, which other processes cannot recognise; with `shared`, return a text, "
        "a number, or a tuple of them"
    )


def _channel_key(options: Options, function: Any) -> str:
    """What shared processes know the limits by."""
    if options.source is not None and options.config is not None:
        with contextlib.suppress(KeyError):
            return source_keys(load_config(options.config))[options.source]
    module = getattr(function, "__module__", "")
    of_machine = options.shared == "machine" or (options.shared == "auto" and not ray_is_up())
    if of_machine and module in ("__main__", "__mp_main__"):
        # Every script of a machine has a module of this name.
        module = os.path.realpath(getattr(sys.modules.get(module), "__file__", None) or module)
    name = f"{module}.{getattr(function, '__qualname__', options.name)}"
    return "function " + hashlib.sha256(name.encode()).hexdigest()[:16]


def setter(future: asyncio.Future[Any]) -> Callable[[Any], None]:
    """Return what sets the result of a future, unless that was cancelled."""

    def set_result(result: Any) -> None:
        # Not `set_exception`: a future refuses StopIteration, and logs an exception that is never read.
        if not future.done():
            future.set_result(result)

    return set_result
