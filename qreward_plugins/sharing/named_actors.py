"""Named Ray actors that the processes of a job share: whoever comes first starts one, everybody finds it.

A named actor that is not detached ends with the process that started it, and with the job at the latest, so nothing is
left behind; it ends, too, when that process forgets its handle, which is why handles are kept here. Where an actor was
killed, Ray starts it anew (`max_restarts`), and where its owner died with it, the next process that asks does. A mark
in Ray's own store, which lives as long as the cluster, tells a first start from any later one.

Every function here may block for as long as Ray takes to answer: call them from a thread.
"""

from __future__ import annotations

import threading
from typing import Any

MANY = 1_000_000
"""Calls that an actor may hold at once: those that wait for something cost a coroutine each."""

_MARKS = b"qreward"

_handles: dict[tuple[str, str], Any] = {}
_lock = threading.Lock()


def ray_is_up() -> bool:
    """Whether Ray is initialised in this process; it is not imported for that."""
    import sys

    ray = sys.modules.get("ray")
    return bool(ray is not None and ray.is_initialized())


def get_or_start(name: str, cls: type) -> Any:
    """The handle of this job's actor `name`, an instance of `cls` without arguments, started if there is none.

    It takes no CPU of the cluster's books, and is restarted where its process or its node is lost. Raises what Ray
    raises.
    """
    import ray

    context = ray.get_runtime_context()
    key = (f"{context.get_job_id()}/{context.namespace}", name)
    with _lock:
        handle = (
            ray.remote(cls)
            .options(name=name, get_if_exists=True, num_cpus=0, max_restarts=-1, max_concurrency=MANY)
            .remote()
        )
        _handles[key] = handle
        return handle


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
