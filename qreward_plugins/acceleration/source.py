"""The source behind an accelerated function: calls it in the event loop, in threads, or in worker processes."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any, Literal

from ..errors import (
    EngineError,
    InputError,
    NotStarted,
    PermanentError,
    SampleFault,
    SourceError,
    Throttled,
    TransientError,
)
from ..secrets import one_line
from ..sources import threads
from ..sources.base import Reply, Request
from ..sources.threads import FunctionRaised, ThreadSlots, TooManyAbandoned
from ..sources.worker_program import VALUE
from ..sources.workers import CannotLoad, CannotStart, PoolClosed, ValueTooLarge, WorkerDied, WorkerPool
from .invocation import Invocation
from .notes import add_note
from .options import MOST_THREADS
from .worker_functions import WorkerLoader, result_of

Kind = Literal["async", "sync", "async_generator", "generator"]
"""What a function is."""

_LONGEST_S = 1e9
"""Time limit of a worker's call for those without one: the scheduler ends calls, and the pool kills the worker."""
_MESSAGE_CHARS = 300
_OUR_FILES = (__file__, threads.__file__)


class CallableSource:
    """Calls `function`. `loader` loads it in worker processes; None: it runs here. `slots` is the number of threads or
    processes; None: any number.
    """

    local = True
    sliced = False

    def __init__(
        self, name: str, function: Callable[..., Any], kind: Kind, *, loader: WorkerLoader | None, slots: int | None
    ) -> None:
        self._name = name
        self._function = function
        self._kind = kind
        self._loader = loader
        self._slots = slots
        self._pool: WorkerPool | None = None
        self._threads = ThreadSlots(name, MOST_THREADS) if kind in ("sync", "generator") and loader is None else None

    @property
    def name(self) -> str:
        return self._name

    @property
    def model(self) -> str:
        return self._name

    @property
    def slots(self) -> int | None:
        return self._slots

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        """Call the function once, in the context variables of its caller.

        What it raises is kept in the invocation, and tells the scheduler only whether to retry.
        """
        invocation: Invocation = request.parameters["invocation"]
        for variable, value in invocation.context.items():
            # Each attempt is a task with a context of its own. Python 3.10 cannot start a task in a given one.
            variable.set(value)
        error: BaseException
        try:
            return Reply(value=await self._call(invocation, on_sent))
        except asyncio.CancelledError as cancelled:
            invocation.errors[request.parameters["attempt"]] = cancelled
            raise
        except FunctionRaised as wrapper:
            error = wrapper.error
        except GeneratorExit:
            # Its event loop was closed; nothing may follow.
            raise
        except BaseException as raised:
            # SystemExit, too: it belongs to the caller, and would end the event loop here.
            error = raised
        try:
            _cut_traceback(error)
            invocation.errors[request.parameters["attempt"]] = error
            failure = _failure(error, invocation)
        finally:
            del error
        raise failure

    async def aclose(self) -> None:
        """End the worker processes. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()

    async def _call(self, invocation: Invocation, on_sent: Callable[[], None]) -> Any:
        if self._kind == "async":
            on_sent()
            return await self._function(*invocation.args, **invocation.kwargs)
        if invocation.items is not None:
            on_sent()
            await invocation.items.fill(self._items(invocation), invocation.options.timeout_s)
            return None
        if self._threads is None:
            return await self._in_process(invocation, on_sent)
        value = await self._in_thread(functools.partial(self._function, *invocation.args, **invocation.kwargs), on_sent)
        if inspect.iscoroutine(value):
            value.close()
            raise InputError(f"{self._name} returned a coroutine; define it with `async def`")
        return value

    def _items(self, invocation: Invocation) -> Any:
        """The asynchronous iterator over the items of a generator."""
        made = self._function(*invocation.args, **invocation.kwargs)
        return made if self._kind == "async_generator" else _InThreads(made, self._in_thread)

    async def _in_thread(self, call: Callable[[], Any], on_sent: Callable[[], None]) -> Any:
        assert self._threads is not None
        try:
            return await self._threads.run(call, on_start=on_sent)
        except TooManyAbandoned as error:
            raise NotStarted(f"{self._name}: {error}; mode='process' kills such calls") from None

    async def _in_process(self, invocation: Invocation, on_sent: Callable[[], None]) -> Any:
        assert self._loader is not None
        try:
            message = pickle.dumps((invocation.args, dict(invocation.kwargs)), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise InputError(f"{self._name}: its arguments cannot be pickled for a worker process: {error}") from error
        if self._pool is None:
            self._pool = WorkerPool(self._loader, self._slots or 1)
        try:
            kind, payload = await self._pool.call(message, _LONGEST_S, on_start=on_sent)
        except WorkerDied as error:
            raise SampleFault(f"{self._name}: its worker process died ({error})", reason="crashed") from None
        except ValueTooLarge:
            raise InputError(f"{self._name} returned a value that is too large for a worker process") from None
        except CannotLoad as error:
            invocation.refused = True
            raise EngineError(f"{self._name} cannot be loaded in a worker process: {error}") from None
        except PoolClosed:
            invocation.refused = True
            raise EngineError(f"{self._name} is closed") from None
        except (CannotStart, OSError) as error:
            raise NotStarted(f"{self._name}: no worker process can be started ({error})") from None
        content = pickle.loads(payload)
        if kind != VALUE:
            raise InputError(f"{self._name}: {content}")
        return result_of(content)


class _InThreads:
    """A sync generator as an asynchronous iterator; each item is made in a thread."""

    def __init__(self, made: Any, run: Callable[[Callable[[], Any], Callable[[], None]], Any]) -> None:
        self._made = made
        self._run = run

    def __aiter__(self) -> _InThreads:
        return self

    async def __anext__(self) -> Any:
        try:
            ended, item = await self._run(self._next, _nothing)
        except FunctionRaised as wrapper:
            raise wrapper.error from None
        if ended:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        try:
            await self._run(self._made.close, _nothing)
        except FunctionRaised as wrapper:
            if isinstance(wrapper.error, ValueError):  # it hangs in another thread, which closes it when it returns
                return
            raise wrapper.error from None

    def _next(self) -> tuple[bool, Any]:
        try:
            return False, next(self._made)
        except StopIteration:
            return True, None


def _nothing() -> None:
    """Nobody waits for the start of the thread."""


def _failure(error: BaseException, invocation: Invocation) -> SourceError:
    """The error that tells the scheduler whether to retry. It does not refer to `error`, whose frames refer to it."""
    text = f"{type(error).__name__}: {one_line(_text(error), _MESSAGE_CHARS)}"
    if isinstance(error, Throttled):
        retry_after_s = error.retry_after_s
        return Throttled(
            text, retry_after_s=None if retry_after_s is None or math.isnan(retry_after_s) else retry_after_s
        )
    try:
        again = invocation.options.retries_error(error)
    except Exception as problem:
        add_note(error, f"not retried, because retry_on raised {type(problem).__name__}: {_text(problem)}")
        return PermanentError(f"{text}; retry_on raised {type(problem).__name__}")
    return TransientError(text) if again else PermanentError(text)


def _cut_traceback(error: BaseException) -> None:
    """Let the traceback begin in the function. Our frames refer to the call, which refers to the error."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OUR_FILES:
        traceback = traceback.tb_next
    error.__traceback__ = traceback


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be read)"
