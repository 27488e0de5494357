"""Named Ray actors that the processes of a job share: the first process starts one, the others find it.

A named actor that is not detached ends with the process that started it, at the latest with the job, so nothing is left
behind. It also ends when that process drops its handle, so handles are kept here. Ray restarts a killed actor
(`max_restarts`); if its owner died, too, the next process that asks starts it. A mark in Ray's own store, which lives
as long as the cluster, distinguishes the first start from later ones.

A call that asks Ray for an actor blocks until Ray answers, which may be never if the cluster has failed. So make it by
`threads.in_thread`.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

MANY = 1_000_000
"""Most concurrent calls of an actor. A waiting call costs a coroutine."""

_MARKS = b"qreward"
_ADDRESS = re.compile(r"([^:/]+):(\d+)")
_ANSWERS_WITHIN_S = 10.0

_handles: dict[tuple[str, str], Any] = {}
_lock = threading.Lock()


def ray_is_up() -> bool:
    """Whether Ray is initialised in this process. This does not import Ray."""
    import sys

    # The module may be partly imported, or a stand-in.
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return bool(is_initialized is not None and is_initialized())


def in_ray_actor() -> bool:
    """Whether this process is an actor of Ray."""
    if not ray_is_up():
        return False
    import ray

    return ray.get_runtime_context().get_actor_id() is not None


def job_name() -> str | None:
    """Return what identifies the job of Ray that this process belongs to, among all jobs of all clusters; None without
    one. Asks no other process. Raises nothing.
    """
    if not ray_is_up():
        return None
    import ray

    try:
        context = ray.get_runtime_context()
        # Each cluster numbers its jobs from 1, so a job's number alone comes again. Older versions have no method.
        ask = getattr(context, "get_session_name", None)
        session = ask() if ask is not None else context.worker.node.session_name
        return f"{session} {context.get_job_id()}"
    except Exception:
        # Such as a client of a remote cluster, which has no session here.
        return None


def missing_ray() -> str:
    """Say why Ray cannot be used in this process, where `ray_is_up` is false."""
    if find_spec("ray") is None:
        return 'needs Ray, which is not installed: pip install "qreward-plugins[ray]".'
    return "needs Ray, which is not initialised in this process: call ray.init() first."


def join_cluster() -> None:
    """Join the Ray cluster of this machine, or of `RAY_ADDRESS`, unless that is done. It never starts one. Call it in a
    thread: in the main one, Ray takes the process's handling of SIGTERM.

    Raises `ConnectionError`, whose message says in one sentence what is missing.
    """
    if ray_is_up():
        return
    if find_spec("ray") is None:
        raise ConnectionError('Ray is not installed: pip install "qreward-plugins[ray]"')
    import ray

    address = os.environ.get("RAY_ADDRESS", "").strip()
    if address == "local":
        raise ConnectionError("RAY_ADDRESS=local names no cluster that runs: set it to the address of one")
    try:
        if place := _ADDRESS.fullmatch(address):
            # Ray itself takes minutes to say that nothing is there.
            socket.create_connection((place[1], int(place[2])), _ANSWERS_WITHIN_S).close()
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except OSError:  # ConnectionError is one
        missing = (
            f"no Ray cluster answers at RAY_ADDRESS={address}" if address else "no Ray cluster runs on this machine"
        )
        remedy = "start one with `ray start --head`, or set RAY_ADDRESS to the address of one"
        raise ConnectionError(f"{missing}: {remedy}") from None
    except (RuntimeError, ValueError) as error:  # another version of Ray or Python, an address that is none
        # Ray's first sentence says what is wrong. A list of remedies for other callers may follow.
        first, *_ = re.split(r"\.\s|\n", str(error).strip())
        where = f" of RAY_ADDRESS={address}" if address else ""
        raise ConnectionError(f"the Ray cluster{where} cannot be joined: {first}") from None


def get_or_start(name: str, cls: type, *, arguments: Sequence[Any] = (), **options: Any) -> Any:
    """The handle of this job's actor `name`, an instance of `cls`, started with `arguments` if there is none.
    `options`: further ones of Ray, such as where it is placed.

    It reserves no CPU of the cluster, and is restarted if its process or its node is lost. Raises Ray's errors, and
    `ConnectionError` if Ray was shut down, because a call would start it again.
    """
    import ray

    if not ray.is_initialized():
        raise ConnectionError("Ray was shut down in this process")
    context = ray.get_runtime_context()
    key = (f"{context.get_job_id()}/{context.namespace}", name)
    with _lock:
        handle = (
            ray.remote(cls)
            .options(name=name, get_if_exists=True, num_cpus=0, max_restarts=-1, max_concurrency=MANY, **options)
            .remote(*arguments)
        )
        kept = _handles.get(key)
        if kept is not None and kept._actor_id == handle._actor_id:
            # Only the handle that started the actor keeps it alive, not one that was found by name.
            return kept
        _handles[key] = handle
        return handle


def start_ahead(name: str, cls: type) -> None:
    """Start this job's actor `name` in the background, if there is none, because its process takes seconds to start.
    Without Ray, or if it fails, nothing happens.
    """

    def start() -> None:
        with suppress(Exception):  # a later call of `get_or_start` raises it
            get_or_start(name, cls)

    if ray_is_up():
        threading.Thread(target=start, name="qreward-ray", daemon=True).start()


def first_start(name: str) -> bool:
    """For an actor's constructor: whether this is the first start of an actor `name` in this job."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_put

    context = ray.get_runtime_context()
    mark = f"{context.get_job_id()}/{context.namespace}/{name}"
    return not _internal_kv_put(mark.encode(), b"", overwrite=False, namespace=_MARKS)


def kill(handle: Any) -> None:
    """End an actor that does not answer. The next call of `get_or_start` starts another one."""
    import ray

    ray.kill(handle, no_restart=True)
