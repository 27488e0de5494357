"""Named Ray actors that the processes of a job share: whoever comes first starts one, everybody finds it.

A named actor that is not detached ends with the process that started it, and with the job at the latest, so nothing is
left behind; it ends, too, when that process forgets its handle, which is why handles are kept here. Where an actor was
killed, Ray starts it anew (`max_restarts`), and where its owner died with it, the next process that asks does. A mark
in Ray's own store, which lives as long as the cluster, tells a first start from any later one.

What asks Ray for an actor blocks for as long as Ray takes to answer, for ever where the cluster is in trouble. So it is
called by `in_thread`, whose threads keep no process and no event loop from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

MANY = 1_000_000
"""Calls that an actor may hold at once: those that wait for something cost a coroutine each."""

_MARKS = b"qreward"

_handles: dict[tuple[str, str], Any] = {}
_lock = threading.Lock()


def ray_is_up() -> bool:
    """Whether Ray is initialised in this process; it is not imported for that."""
    import sys

    # What goes by that name may be half imported, or a stand-in.
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return bool(is_initialized is not None and is_initialized())


def get_or_start(name: str, cls: type) -> Any:
    """The handle of this job's actor `name`, an instance of `cls` without arguments, started if there is none.

    It takes no CPU of the cluster's books, and is restarted where its process or its node is lost. Raises what Ray
    raises, and `ConnectionError` where it was shut down: asking it then would start another one.
    """
    import ray

    if not ray.is_initialized():
        raise ConnectionError("Ray was shut down in this process")
    context = ray.get_runtime_context()
    key = (f"{context.get_job_id()}/{context.namespace}", name)
    with _lock:
        handle = (
            ray.remote(cls)
            .options(name=name, get_if_exists=True, num_cpus=0, max_restarts=-1, max_concurrency=MANY)
            .remote()
        )
        kept = _handles.get(key)
        if kept is not None and kept._actor_id == handle._actor_id:
            # One that was found by its name does not keep the actor alive, as the one does that it was started by.
            return kept
        _handles[key] = handle
        return handle


def start_ahead(name: str, cls: type) -> None:
    """Begin to start this job's actor `name`, if there is none, and return at once: its process takes seconds to come
    up, and whoever asks for it later finds it there. Without Ray, or if it fails, nothing happens.
    """

    def start() -> None:
        with suppress(Exception):  # whoever asks for it finds out
            get_or_start(name, cls)

    if ray_is_up():
        threading.Thread(target=start, name="qreward-ray", daemon=True).start()


def first_start(name: str) -> bool:
    """For an actor's constructor: whether no actor `name` of this job was ever started before."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_put

    context = ray.get_runtime_context()
    mark = f"{context.get_job_id()}/{context.namespace}/{name}"
    return not _internal_kv_put(mark.encode(), b"", overwrite=False, namespace=_MARKS)


def kill(handle: Any) -> None:
    """End an actor that does not answer, for good; the next who asks starts another one."""
    import ray

    ray.kill(handle, no_restart=True)


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """What `function` returns or raises, from a daemon thread of its own, as a future of the running event loop."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: Exception | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = function()
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=run, name="qreward-ray", daemon=True).start()
    return result
