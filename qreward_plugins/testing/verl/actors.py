"""Ray actors in one process: enough of `ray` for reward workers, and for what qreward shares between them.

Every actor lives on the trainer's event loop, where verl has a process for each. As there, an actor with async methods
carries 1,000 calls at once, arguments and results are copies, an exception reaches the caller as a `RayTaskError` that
is of the exception's own class, too, and a call to an actor that died raises `RayActorError`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
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


class RayTaskError(RayError):
    """An exception that an actor's method raised; `cause` is that."""

    cause: BaseException


class ObjectRef:
    """What a call to an actor gives: `await` it, or `ray.get` it. Giving up the wait does not end the call."""

    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, Any]:
        answer = asyncio.wrap_future(self._future)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever gave up may not look
        return asyncio.shield(answer).__await__()

    def future(self) -> concurrent.futures.Future[Any]:
        return self._future


class FakeRay:
    """The actors of one job, and the functions of `ray`. Close it with the loop that it lives on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._named: dict[str, Actor] = {}
        self._actors: list[Actor] = []
        self._keys: set[bytes] = set()

    def modules(self) -> dict[str, Mapping[str, Any]]:
        """What stands in for `ray`, by module."""
        job = uuid.uuid4().hex
        context = SimpleNamespace(
            get_job_id=lambda: job,
            get_session_name=lambda: "fake-verl",
            get_node_id=lambda: "node",
            get_actor_id=lambda: None,
            namespace="fake-verl",
        )
        return {
            "ray": {
                "get": self.get,
                "get_actor": self.get_actor,
                "get_runtime_context": lambda: context,
                "is_initialized": lambda: True,
                "kill": lambda handle, **_: self.kill(handle),
                "remote": self.remote,
            },
            "ray.exceptions": {
                "ActorDiedError": RayActorError,
                "GetTimeoutError": TimeoutError,
                "RayActorError": RayActorError,
                "RayError": RayError,
                "RayTaskError": RayTaskError,
            },
            "ray.util": {},
            "ray.util.scheduling_strategies": {"NodeAffinitySchedulingStrategy": SimpleNamespace},
            "ray.experimental": {},
            "ray.experimental.internal_kv": {"_internal_kv_put": self._kv_put},
        }

    def remote(self, cls: type | None = None, **options: Any) -> Any:
        """The class of actors made of `cls`; without a class, a decorator."""
        if cls is None:
            return lambda given: self.remote(given, **options)
        return SimpleNamespace(
            options=lambda **more: self.remote(cls, **{**options, **more}),
            remote=lambda *arguments, **named: self._start(cls, arguments, named, options),
        )

    def get(self, refs: Any, *, timeout: float | None = None) -> Any:
        """The results, from any thread but the loop's. Raises what the calls raised, and `TimeoutError`."""
        if isinstance(refs, Sequence):
            return [self.get(ref, timeout=timeout) for ref in refs]
        return refs.future().result(timeout)

    def get_actor(self, name: str) -> ActorHandle:
        """The actor of this name. Raises `ValueError` if there is none."""
        actor = self._named.get(name)
        if actor is None or actor.is_dead:
            raise ValueError(f"Failed to look up actor with name '{name}'.")
        return ActorHandle(actor)

    def kill(self, handle: ActorHandle) -> None:
        """End an actor: its calls fail. None is restarted."""
        self.loop.call_soon_threadsafe(handle._actor.kill)

    def _start(
        self, cls: type, arguments: tuple[Any, ...], named: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ActorHandle:
        """An actor, or the one that has its name already (`get_if_exists`)."""
        name = options.get("name")
        known = self._named.get(name) if name is not None and options.get("get_if_exists") else None
        if known is not None and not known.is_dead:
            return ActorHandle(known)
        actor = Actor(self.loop, cls, arguments, named, int(options.get("max_concurrency", ASYNC_CALLS)))
        self._actors.append(actor)
        if name is not None:
            self._named[name] = actor
        return ActorHandle(actor)

    async def aclose(self) -> None:
        """End all actors. What has an `aclose` is closed by it first, while the others are still there."""
        for actor in self._actors:
            await actor.aclose_instance()
        for actor in self._actors:
            actor.kill()
            await asyncio.gather(*actor.running, return_exceptions=True)

    def _kv_put(self, key: bytes, value: bytes, overwrite: bool = True, namespace: bytes = b"") -> bool:
        """Returns whether the key was there already, which is all that qreward asks."""
        known = namespace + key in self._keys
        self._keys.add(namespace + key)
        return known


class Actor:
    """One actor: its instance, and the calls that are under way. `most`: how many it carries at once."""

    _numbers = itertools.count()

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        cls: type,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
        most: int,
    ) -> None:
        self.actor_id = next(self._numbers)
        self.is_dead = False
        self.running: set[asyncio.Task[Any]] = set()
        self._loop, self._cls = loop, cls
        self._slots = asyncio.Semaphore(most)
        self._instance = asyncio.run_coroutine_threadsafe(self._make(*copy.deepcopy((arguments, dict(named)))), loop)

    def call(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> ObjectRef:
        """Call a method, from any thread."""
        answer = self._answer(method, *copy.deepcopy((arguments, named)))
        return ObjectRef(asyncio.run_coroutine_threadsafe(answer, self._loop))

    def kill(self) -> None:
        """End it; on its event loop."""
        self.is_dead = True
        for task in self.running:
            task.cancel()

    async def instance(self) -> Any:
        """What the actor is made of, once it is made. Raises what making it raised."""
        return await asyncio.shield(asyncio.wrap_future(self._instance))

    async def aclose_instance(self) -> None:
        """Close what the actor is made of, if it can be."""
        if self._instance.done() and self._instance.exception() is None:
            close = getattr(self._instance.result(), "aclose", None)
            if close is not None:
                await close()

    async def _make(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return self._cls(*arguments, **named)

    async def _answer(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        async with self._slots:
            task = asyncio.ensure_future(self._result(method, arguments, named))
            self.running.add(task)
            task.add_done_callback(self.running.discard)
            try:
                return await task
            except asyncio.CancelledError:
                raise self._died() from None
            except RayError:
                raise
            except Exception as error:
                raise as_task_error(error) from error

    async def _result(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.is_dead:
            raise self._died()
        result = getattr(await self.instance(), method)(*arguments, **named)
        return copy.deepcopy(await result if asyncio.iscoroutine(result) else result)

    def _died(self) -> RayActorError:
        name = self._cls.__name__
        return RayActorError(f"The actor died unexpectedly before finishing this task. class_name: {name}")


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
        self.cause, self.args = cause, (cause,)

    body = {
        "__init__": start,
        "__str__": lambda self: f"{cls.__name__}: {self.cause}",
        "__getattr__": lambda self, name: getattr(self.__dict__["cause"], name),
    }
    try:
        wrapped: RayError = type(f"RayTaskError({cls.__name__})", (RayTaskError, cls), body)(error)
    except TypeError:  # a class that no other can be made of
        wrapped = type(f"RayTaskError({cls.__name__})", (RayTaskError,), body)(error)
    return wrapped
