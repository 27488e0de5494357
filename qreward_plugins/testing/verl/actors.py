"""Ray actors in one process: enough of `ray` for reward workers, and for what qreward shares between them.

Every actor lives on the trainer's event loop, where verl has a process for each. As there, arguments and results are
copies, and an exception reaches the caller as a `RayTaskError` that is of the exception's own class, too.
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


class RayError(Exception):
    """Whatever goes wrong in Ray."""


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
        errors = dict.fromkeys(("ActorDiedError", "RayActorError"), type("RayActorError", (RayError,), {}))
        return {
            "ray": {
                "get": self.get,
                "get_actor": self.get_actor,
                "get_runtime_context": lambda: context,
                "is_initialized": lambda: True,
                "remote": self.remote,
            },
            "ray.exceptions": {**errors, "RayError": RayError, "RayTaskError": RayTaskError},
            "ray.util.scheduling_strategies": {"NodeAffinitySchedulingStrategy": SimpleNamespace},
            "ray.experimental.internal_kv": {"_internal_kv_put": self._kv_put},
        }

    def remote(self, cls: type, **options: Any) -> Any:
        """The class of actors made of `cls`."""
        return SimpleNamespace(
            options=lambda **more: self.remote(cls, **{**options, **more}),
            remote=lambda *arguments, **named: self._start(cls, arguments, named, options.get("name")),
        )

    def get(self, refs: Any, *, timeout: float | None = None) -> Any:
        """The results, from any thread but the loop's. Raises what the calls raised, and `TimeoutError`."""
        if isinstance(refs, Sequence):
            return [self.get(ref, timeout=timeout) for ref in refs]
        return refs.future().result(timeout)

    def get_actor(self, name: str) -> Actor:
        """The actor of this name."""
        return self._named[name]

    def _start(self, cls: type, arguments: tuple[Any, ...], named: Mapping[str, Any], name: str | None) -> Actor:
        """An actor, or the one that has its name already."""
        actor = None if name is None else self._named.get(name)
        if actor is None:
            actor = Actor(self.loop, cls, arguments, named)
            self._actors.append(actor)
        if name is not None:
            self._named[name] = actor
        return actor

    async def aclose(self) -> None:
        """Close what has an `aclose`, while all other actors are still there."""
        for actor in self._actors:
            await actor._aclose()

    def _kv_put(self, key: bytes, value: bytes, overwrite: bool = True, namespace: bytes = b"") -> bool:
        """Returns whether the key was there already, which is all that qreward asks."""
        known = namespace + key in self._keys
        self._keys.add(namespace + key)
        return known


class Actor:
    """One actor, and its handle: `actor.method.remote(...)`."""

    _numbers = itertools.count()

    def __init__(
        self, loop: asyncio.AbstractEventLoop, cls: type, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        self._actor_id = next(self._numbers)
        self._loop = loop
        made = self._make(cls, *copy.deepcopy((arguments, dict(named))))
        self._instance = asyncio.run_coroutine_threadsafe(made, loop)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def remote(*arguments: Any, **named: Any) -> ObjectRef:
            result = self._result(method, *copy.deepcopy((arguments, named)))
            return ObjectRef(asyncio.run_coroutine_threadsafe(result, self._loop))

        return SimpleNamespace(remote=remote)

    def __deepcopy__(self, _: Any) -> Actor:
        return self

    async def _made(self) -> Any:
        """What the actor is made of, once it is made. Raises what making it raised."""
        return await asyncio.shield(asyncio.wrap_future(self._instance))

    async def _aclose(self) -> None:
        if self._instance.done() and self._instance.exception() is None:
            close = getattr(self._instance.result(), "aclose", None)
            if close is not None:
                await close()

    async def _make(self, cls: type, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return cls(*arguments, **named)

    async def _result(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            result = getattr(await self._made(), method)(*arguments, **named)
            return copy.deepcopy(await result if asyncio.iscoroutine(result) else result)
        except RayError:
            raise
        except Exception as error:
            raise _as_task_error(error) from error


def _as_task_error(error: Exception) -> RayError:
    """The exception as its caller gets it: of its own class and a `RayTaskError`."""
    name = type(error).__name__

    def start(self: Any, cause: BaseException) -> None:
        self.cause, self.args = cause, (cause,)

    body = {
        "__init__": start,
        "__str__": lambda self: f"{name}: {self.cause}",
        "__getattr__": lambda self, attribute: getattr(self.__dict__["cause"], attribute),
    }
    wrapped: RayError = type(f"RayTaskError({name})", (RayTaskError, type(error)), body)(error)
    return wrapped
