"""Makes a method of a named Ray actor a function of a source, awaited in this process.

Ray places the actor, gives it its devices, and starts it again if the user said so. So there is no worker process here,
and no pool: limits, batches, retries and time limits are those of every async function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..errors import NotStarted, SampleFault
from ..secrets import EXCERPT_CHARS, one_line
from ..system.functions import FunctionNotFound, PathLoader, no_such_name
from ..system.ray_actors import missing_ray, ray_is_up
from ..system.threads import in_thread

_SCHEME = "ray:"
_MOST_NAMES = 10


def is_ray_method(path: str) -> bool:
    """Whether the path of a function names a method of an actor."""
    return path.startswith(_SCHEME)


class RayMethod(PathLoader):
    """Loads the method at `path`, as `ray:ACTOR.method` or `ray:NAMESPACE/ACTOR.method`; picklable."""

    def __init__(self, path: str) -> None:
        self.path = path
        where, _, self._method = path.removeprefix(_SCHEME).rpartition(".")
        namespace, _, self._actor = where.rpartition("/")
        self._namespace = namespace or None

    def __call__(self) -> Callable[..., Any]:
        """Find the actor, and return an async function that calls its method.

        Cancelling a call cancels it in the actor if it waits there, or if the method is async. A sync method that has
        begun goes on, and later calls wait for its end. A call raises what the method raises, SampleFault if the actor
        dies meanwhile, and NotStarted if it does not answer or is gone; the next call looks for an actor of this name
        again.

        Raises FunctionNotFound.
        """
        method: Any = self._find()

        async def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal method
            from ray import cancel
            from ray.exceptions import RayActorError, RayTaskError

            # Without the second test, a call after `ray.shutdown` would start Ray again.
            if method is None or not ray_is_up():
                try:
                    method = await in_thread(self._find)
                except FunctionNotFound as error:
                    raise NotStarted(str(error)) from None
            reference = method.remote(*args, **kwargs)
            try:
                return await reference
            except asyncio.CancelledError:
                cancel(reference)
                raise
            except RayTaskError as error:
                raise error.cause from None
            except RayActorError as error:
                # This call may have killed it. Those that waited in it have their further try, too.
                method = None
                problem = f"its actor died ({one_line(str(error), EXCERPT_CHARS)})"
                raise SampleFault(problem, reason="crashed") from None

        return call

    def _find(self) -> Any:
        if not ray_is_up():
            raise FunctionNotFound(f"it {missing_ray()}")
        import ray

        try:
            actor = ray.get_actor(self._actor, self._namespace)
        except ValueError:
            actor = None
        if actor is None:
            namespace = self._namespace or ray.get_runtime_context().namespace
            named = [f"{each['namespace']}/{each['name']}" for each in ray.util.list_named_actors(all_namespaces=True)]
            shown = ", ".join(sorted(named)[:_MOST_NAMES]) or "none"
            problem = f"no actor {self._actor!r} runs in the namespace {namespace!r} (named actors: {shown})."
            raise FunctionNotFound(f"{problem} Start it first, by options(name=...), or name its namespace.")
        if not hasattr(actor, self._method):
            raise FunctionNotFound(no_such_name(actor, f"the actor {self._actor!r}", self._method))
        return getattr(actor, self._method)
