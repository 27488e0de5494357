"""Ray actors in one process: enough of `ray` for reward workers, the group barrier and whatever they share.

Every actor lives on the trainer's event loop, where verl has a process for each. As there, an actor with async methods
carries 1,000 calls at once, arguments and results are copies, an exception reaches the caller as a `RayTaskError` that
is of the exception's own class, too, and a call to an actor that died raises `RayActorError`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import inspect
import itertools
import uuid
from collections.abc import Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

ASYNC_CALLS = 1_000


class RayError(Exception):
    """Whatever goes wrong in Ray."""


class RayActorError(RayError):
    """An actor died."""


class GetTimeoutError(RayError, TimeoutError):
    """No answer in time."""


class RayTaskError(RayError):
    """An exception that an actor's method raised; `cause` is that."""

    cause: BaseException


class ObjectRef:
    """What a call to an actor gives: `await` it, or `ray.get` it. Giving up the wait does not end the call."""

    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self.future_ = future

    def __await__(self) -> Generator[Any, None, Any]:
        answer = asyncio.wrap_future(self.future_)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever gave up may not look
        return asyncio.shield(answer).__await__()

    def future(self) -> concurrent.futures.Future[Any]:
        return self.future_


class FakeRay:
    """The actors of one job, and the functions of `ray`. Close it with the loop that it lives on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._named: dict[str, Actor] = {}
        self._actors: list[Actor] = []
        self._store: dict[bytes, bytes] = {}
        self._numbers = itertools.count()

    def modules(self) -> dict[str, Mapping[str, Any]]:
        """What stands in for `ray`, by module."""
        job = uuid.uuid4().hex
        context = SimpleNamespace(
            get_job_id=lambda: job,
            get_session_name=lambda: "fake-verl",
            get_node_id=lambda: "node",
            namespace="fake-verl",
        )
        return {
            "ray": {
                "ObjectRef": ObjectRef,
                "get": self.get,
                "get_actor": self.get_actor,
                "get_runtime_context": lambda: context,
                "init": lambda *_, **__: None,
                "is_initialized": lambda: True,
                "kill": self.kill,
                "nodes": lambda: [{"NodeID": "node", "Alive": True, "Resources": {"CPU": 1.0}}],
                "put": copy.deepcopy,
                "remote": self.remote,
            },
            "ray.actor": {"ActorHandle": ActorHandle},
            "ray.exceptions": {
                "ActorDiedError": RayActorError,
                "GetTimeoutError": GetTimeoutError,
                "RayActorError": RayActorError,
                "RayError": RayError,
                "RayTaskError": RayTaskError,
            },
            "ray.util": {},
            "ray.util.scheduling_strategies": {"NodeAffinitySchedulingStrategy": SimpleNamespace},
            "ray.experimental": {},
            "ray.experimental.internal_kv": {"_internal_kv_put": self._kv_put, "_internal_kv_get": self._kv_get},
        }

    def remote(self, cls: type | None = None, **_: Any) -> Any:
        """The class of actors made of `cls`; with options only, a decorator."""
        return ActorClass(self, cls) if cls is not None else lambda given: ActorClass(self, given)

    def get(self, refs: Any, *, timeout: float | None = None) -> Any:
        """The results, from any thread but the loop's. Raises what the calls raised."""
        if isinstance(refs, Sequence):
            return [self.get(ref, timeout=timeout) for ref in refs]
        try:
            return refs.future().result(timeout)
        except concurrent.futures.TimeoutError as error:
            if refs.future().done():
                raise
            raise GetTimeoutError("Get timed out: some object(s) not ready.") from error

    def get_actor(self, name: str) -> ActorHandle:
        """The actor of this name. Raises `ValueError` if there is none."""
        actor = self._named.get(name)
        if actor is None or actor.is_dead:
            raise ValueError(f"Failed to look up actor with name '{name}'.")
        return ActorHandle(actor)

    def kill(self, handle: ActorHandle, *, no_restart: bool = True) -> None:
        """End an actor: its calls fail. One that Ray restarts starts anew, with nothing in it, unless `no_restart`."""
        handle._actor.kill(no_restart=no_restart)

    def start(self, cls: type, arguments: tuple[Any, ...], named: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """An actor, or the one that has its name already (`get_if_exists`)."""
        name = options.get("name")
        known = self._named.get(name) if name is not None else None
        if known is not None and not known.is_dead and options.get("get_if_exists"):
            return ActorHandle(known)
        actor = Actor(self, cls, arguments, named, options, next(self._numbers))
        self._actors.append(actor)
        if name is not None:
            self._named[name] = actor
        return ActorHandle(actor)

    async def aclose(self) -> None:
        """End all actors. What has an `aclose` is closed by it first, while the others are still there."""
        for actor in self._actors:
            await actor.aclose_instance()
        for actor in self._actors:
            await actor.aclose()

    def _kv_put(self, key: bytes, value: bytes, overwrite: bool = True, namespace: bytes = b"") -> bool:
        there = namespace + key in self._store
        if overwrite or not there:
            self._store[namespace + key] = value
        return there

    def _kv_get(self, key: bytes, namespace: bytes = b"") -> bytes | None:
        return self._store.get(namespace + key)


class ActorClass:
    """`ray.remote(cls)`."""

    def __init__(self, ray: FakeRay, cls: type, options: Mapping[str, Any] | None = None) -> None:
        self._ray, self._cls, self._options = ray, cls, dict(options or {})

    def options(self, **options: Any) -> ActorClass:
        return ActorClass(self._ray, self._cls, {**self._options, **options})

    def remote(self, *arguments: Any, **named: Any) -> Any:
        return self._ray.start(self._cls, arguments, named, self._options)


class Actor:
    """One actor: its instance, and the calls that are under way."""

    def __init__(
        self,
        ray: FakeRay,
        cls: type,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
        options: Mapping[str, Any],
        number: int,
    ) -> None:
        self.actor_id = number
        self.cls = cls
        self.is_dead = False
        self.peak = 0
        """Most calls that ran at once."""
        self._ray = ray
        self._arguments = copy.deepcopy(arguments), copy.deepcopy(dict(named))
        self._restarts = int(options.get("max_restarts", 0))
        is_async = any(inspect.iscoroutinefunction(method) for _, method in inspect.getmembers(cls))
        self._slots = asyncio.Semaphore(int(options.get("max_concurrency", ASYNC_CALLS if is_async else 1)))
        self._running: set[asyncio.Task[Any]] = set()
        self._busy = 0
        self._instance: asyncio.Task[Any] | None = None
        self._started = asyncio.Event()
        ray.loop.call_soon_threadsafe(self._start)

    def call(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> ObjectRef:
        """Call a method, from any thread."""
        arguments, named = copy.deepcopy((arguments, named))
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def begin() -> None:
            task = asyncio.ensure_future(self._call(method, arguments, named))
            self._running.add(task)
            task.add_done_callback(lambda done: self._end(done, future))

        self._ray.loop.call_soon_threadsafe(begin)
        return ObjectRef(future)

    def kill(self, *, no_restart: bool) -> None:
        """End it, from any thread."""
        self._ray.loop.call_soon_threadsafe(self._kill, no_restart)

    async def instance(self) -> Any:
        """What the actor is made of, once it is made. Raises what making it raised."""
        await self._started.wait()
        assert self._instance is not None
        return await asyncio.shield(self._instance)

    async def aclose(self) -> None:
        self.is_dead = True
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def aclose_instance(self) -> None:
        """Close what the actor is made of, if it can be."""
        if self._instance is not None and self._instance.done() and self._instance.exception() is None:
            close = getattr(self._instance.result(), "aclose", None)
            if close is not None:
                await close()

    def _start(self) -> None:
        self._instance = asyncio.ensure_future(self._make())
        self._started.set()
        self._instance.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _make(self) -> Any:
        arguments, named = self._arguments
        return self.cls(*arguments, **named)

    def _kill(self, no_restart: bool) -> None:
        for task in list(self._running):
            task.cancel()
        if no_restart or not self._restarts:
            self.is_dead = True
            return
        self._restarts -= 1
        self._start()

    async def _call(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.is_dead:
            raise _died(self.cls)
        async with self._slots:
            self._busy += 1
            self.peak = max(self.peak, self._busy)
            try:
                instance = await self.instance()
                result = getattr(instance, method)(*arguments, **named)
                return copy.deepcopy(await result if inspect.isawaitable(result) else result)
            finally:
                self._busy -= 1

    def _end(self, task: asyncio.Task[Any], future: concurrent.futures.Future[Any]) -> None:
        self._running.discard(task)
        if not future.set_running_or_notify_cancel():
            return
        if task.cancelled():
            future.set_exception(_died(self.cls))
        elif (error := task.exception()) is not None:
            future.set_exception(error if isinstance(error, RayError) else as_task_error(error))
        else:
            future.set_result(task.result())


class ActorHandle:
    """`handle.method.remote(...)`."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._actor_id = actor.actor_id

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        actor = self._actor
        return SimpleNamespace(remote=lambda *arguments, **named: actor.call(method, arguments, named))

    def __deepcopy__(self, _: Any) -> ActorHandle:
        return self


def as_task_error(error: BaseException) -> RayError:
    """The exception as its caller gets it: of its own class and a `RayTaskError`."""
    cls = type(error)

    def start(self: Any, cause: BaseException) -> None:
        self.cause = cause
        self.args = (cause,)

    body = {
        "__init__": start,
        "__str__": lambda self: f"{cls.__name__}: {self.cause}",
        "__getattr__": lambda self, name: getattr(self.__dict__["cause"], name),
    }
    try:
        wrapped: RayError = type(f"RayTaskError({cls.__name__})", (RayTaskError, cls), body)(error)
    except TypeError:
        wrapped = type(f"RayTaskError({cls.__name__})", (RayTaskError,), body)(error)
    wrapped.__cause__ = error
    return wrapped


def _died(cls: type) -> RayActorError:
    return RayActorError(f"The actor died unexpectedly before finishing this task. class_name: {cls.__name__}")
