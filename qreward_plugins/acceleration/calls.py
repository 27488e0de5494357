"""The calls of one accelerated function in one event loop: its keys, each with a dispatcher and limits of its own.

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
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..config import Price, load_config
from ..errors import ConfigurationError, EngineError, Mistake
from ..observers import Observers, with_names
from ..quotas.quota import Quota
from ..quotas.shared import SharedQuota
from ..scheduling import FAILED, Batch, Breaker, Call, ErrorShare, Upstream
from ..sharing.channels import OpenedChannel, open_channel, source_keys
from ..system.ray_actors import missing_ray, ray_is_up
from .invocation import Invocation, Items, size_of
from .limits import ANY_NUMBER, MOST_LEARNED, FunctionLimits
from .options import Options
from .pending import END_WITHIN_S, KeyedCalls, Pending, Raised, setter, shared_name
from .source import CallableSource, Kind, loader_of
from .statistics import AttemptStatistics, DebugLog, FunctionStatistics

KEYS_KEPT = 1024
"""Keys up to which one is kept for `idle_s`. Beyond, it is forgotten as soon as its limits allow a whole burst."""
_LOOKED_AT = 4


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
        self.source = CallableSource(self.name, function, kind, loader=loader, slots=self._limits.places(options))
        self._statistics = AttemptStatistics()
        debug = [("debug log", DebugLog())] if options.debug else []
        self._observers = Observers([self._statistics], [*with_names(options.observers), *debug])
        self._rng = random.Random(options.seed)
        self._keys: OrderedDict[object, KeyedCalls] = OrderedDict()
        self._ends: Counter[str] = Counter()
        self._calls = 0
        self._sequence = itertools.count()
        self._defaults = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = _process
        self._channel: OpenedChannel | None = None
        self._forgetting: set[asyncio.Task[None]] = set()
        self.closed = False

    # Calls

    def submit(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        *,
        on_end: Callable[[Any], None],
        skip: int = 0,
        batches: dict[KeyedCalls, Batch] | None = None,
        items: Callable[[Pending], Items] | None = None,
    ) -> Pending:
        """Submit a call. `on_end` is called with its value, or `Raised`, perhaps before this returns; not if it is
        cancelled. `skip`: arguments that `key` and `size` do not get (`self`). `batches`: those that it joins, one for
        each key; None: it is submitted alone. Raises what `key` and `size` raise.
        """
        loop = self.bind()
        try:
            size = size_of(args[skip:], kwargs) if options.size is None else _size(options.size(*args[skip:], **kwargs))
            keyed = self._keyed(args[skip:], kwargs, loop.time())
        except Exception:
            self._calls += 1
            self._ended(FAILED)
            raise
        all_batches = keyed.dispatcher.batches
        if batches is None:
            batch = all_batches.of_singles(options.number)
        elif keyed not in batches:
            batch = batches[keyed] = all_batches.new((), priority=options.number)
        else:
            batch = batches[keyed]
        keyed.waiting += 1
        self._calls += 1
        invocation = Invocation(args, kwargs, options, size)
        pending = Pending(keyed, invocation, all_batches.join(batch), on_leave=self._ended, on_end=on_end)
        rules = options.rules
        if items is not None:
            invocation.items = items(pending)
            rules = replace(rules, timeout_s=math.inf, hedges=0)
        call = Call((self.name,), invocation.request, _value, name=self.name, rules=rules)
        due_at = math.inf if options.deadline_s is None else loop.time() + options.deadline_s
        job = keyed.dispatcher.submit(call, pending, member=pending.member, deadline_at=due_at)
        if not pending.over:  # it was not refused at once
            pending.job = job
        return pending

    async def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options, *, skip: int = 0) -> Any:
        """Make a call; return its value, or `Raised`. Cancelling it cancels its attempts."""
        try:
            result = asyncio.get_running_loop().create_future()
            pending = self.submit(args, kwargs, options, on_end=setter(result), skip=skip)
        except Exception as error:
            return Raised(error, refused=True)
        try:
            return await result
        except asyncio.CancelledError:
            await pending.drop()
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
        batches: dict[KeyedCalls, Batch] = {}
        pending: list[Pending | Raised] = []
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
                    pending.append(self.submit(args, kwargs, options, on_end=ended, skip=skip, batches=batches))
                except Exception as error:
                    pending.append(Raised(error, refused=True))
                    if stop_at_error:
                        break
            for keyed, batch in batches.items():
                keyed.dispatcher.batches.seal(batch)
            for refused in [each for each in pending if type(each) is Raised]:
                ended(refused)
            left -= 1
            if not left and not over.done():
                over.set_result(None)
            if (failed := await over) is not None:
                return [failed]
            return [each if isinstance(each, Raised) else each.result for each in pending]
        finally:
            over.cancel()
            # All are dropped in one step, so that none of them begins meanwhile.
            waiting = [each for each in pending if isinstance(each, Pending) and not each.over]
            if tasks := [task for each in waiting for task in each.cancel()]:
                await asyncio.wait(tasks, timeout=END_WITHIN_S)

    def defaulted(self) -> None:
        """Count a call that failed and returned its default."""
        self._defaults += 1

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
            loader = self.source._loader
            self.source = CallableSource(self.name, self.function, self.kind, loader=loader, slots=self.source.slots)
        elif self._serves_another():
            raise EngineError(
                f"{self.name} serves another event loop that is still open; await its `aclose()` there first, or "
                "decorate the function once for each loop"
            )
        self._loop = loop
        # The channel of an earlier loop serves this one, too.
        self._channel = self._channel or self._open_channel()
        for keyed in self._keys.values():
            keyed.bind(self._rng, self._observers, self._channel, self._sequence)
        return loop

    def retune(self, options: Options) -> None:
        """Take over new options of the function as a whole. Calls that have started still count."""
        self.options = options
        limits = self._limits.declared(options) if self._channel is not None else self._limits.here(options)
        now = self._loop.time() if self._loop is not None else 0.0
        for keyed in self._keys.values():
            upstream = keyed.upstream
            if options.error_share is not None:
                upstream.quota.learn_up_to(min(self._limits.places(options), MOST_LEARNED))
            upstream.quota.retune(limits, now)
            upstream.breaker.retune(options.failures_to_open, options.recovery_s)
            upstream.error_share = None if options.error_share is None else ErrorShare(options.error_share)
            if self._loop is not None and not self._loop.is_closed():
                keyed.dispatcher.look_again()

    def statistics(self) -> FunctionStatistics:
        """The counts so far."""
        return FunctionStatistics.of(
            self.name,
            self._statistics,
            [keyed.upstream for keyed in self._keys.values()],
            now=0.0 if self._loop is None or self._loop.is_closed() else self._loop.time(),
            calls=self._calls,
            ends=self._ends,
            defaults=self._defaults,
        )

    def window(self, options: Options) -> int:
        """Calls of a stream that are under way at once: enough to keep the function busy."""
        return self._limits.window(options)

    async def aclose(self) -> None:
        """Fail all calls, end their attempts and the worker processes. Idempotent."""
        self.closed = True
        loop = asyncio.get_running_loop()
        if self._process is _process:
            if self._loop is loop:
                await asyncio.gather(*(keyed.aclose() for keyed in self._keys.values()))
                await asyncio.gather(*self._forgetting, return_exceptions=True)
            if self._channel is not None:
                await self._channel.aclose()
            await self.source.aclose()
            self._observers.close(loop.time())
        self._keys.clear()

    def _serves_another(self) -> bool:
        """Whether an earlier event loop may go on with calls of this function."""
        if self._loop is None or self._loop.is_closed():
            return False
        return self._loop.is_running() or any(keyed.waiting for keyed in self._keys.values())

    def _ended(self, reason: str) -> None:
        self._ends[reason] += 1

    def _keyed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], now: float) -> KeyedCalls:
        key = None if self.options.key is None else self.options.key(*args, **kwargs)
        keys = self._keys
        try:
            keyed = keys.get(key)
        except TypeError:
            raise TypeError(f"{self.name}: key returned {type(key).__name__}, which is not hashable") from None
        if keyed is None:
            keyed = keys[key] = self._open(key)
        if self.options.key is not None:
            keys.move_to_end(key)
            self._forget_idle(now, keyed)
        keyed.used_at = now
        return keyed

    def _forget_idle(self, now: float, used: KeyedCalls) -> None:
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
            oldest.dispatcher.close()
            if oldest.membership is not None:
                closing = asyncio.get_running_loop().create_task(oldest.membership.aclose())
                self._forgetting.add(closing)
                closing.add_done_callback(self._forgetting.discard)

    def _open(self, key: object) -> KeyedCalls:
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
        upstream = Upstream(self.source, quota, timeout_s=math.inf, price=Price(), breaker=breaker)
        if options.error_share is not None:
            upstream.error_share = ErrorShare(options.error_share)
        channel_key = self._channel_key
        if key is not None and self._channel is not None:
            channel_key += hashlib.sha256(shared_name(key).encode("utf-8", "replace")).hexdigest()[:16]
        keyed = KeyedCalls(self.name, upstream, channel_key)
        keyed.bind(self._rng, self._observers, self._channel, self._sequence)
        return keyed

    def _open_channel(self) -> OpenedChannel | None:
        shared = self.options.shared
        if shared == "ray" and not ray_is_up():
            remedy = 'Call ray.init() before the first call, or set it to "auto" or "machine".'
            raise ConfigurationError([Mistake("shared", missing_ray(), remedy)], origin="accelerate")
        limits = self._limits.declared(self.options)
        return open_channel(shared, has_rates=bool(limits.requests_per_minute or limits.tokens_per_minute))


def _value(_: object, reply: Any) -> Any:
    return reply.value


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"size must return a number, at least 0, not {value!r}")
    # The scheduler counts in whole bytes; a size of 0.5 s must not become 0.
    return 1 + int(value if isinstance(value, int) else 1000 * value)


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
