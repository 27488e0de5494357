"""A pool on Ray: `RayOwner` is the actor that owns it, `RayServer` one start of one server on its placement group."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio

from ..system.ray_actors import get_or_start, ray_is_up
from ..system.threads import in_thread
from .control import ServerFailed
from .pool import Weights
from .server import LocalServer
from .server_kinds import Platform, PoolSpec

_PLACED_WITHIN_S = 120.0
"""Seconds that the cluster has to place a replica. An autoscaler takes a minute to add a node."""
_LOOK_EVERY_S = 1.0
_STOP_S = 60.0


def cluster_platform() -> Platform:
    """The platform of the nodes of the Ray cluster of this process."""
    if not ray_is_up():
        return "cpu"
    import ray

    return "cuda" if ray.cluster_resources().get("GPU") else "cpu"


def bundle_of(spec: PoolSpec) -> dict[str, float]:
    """Return the resources of one replica. They are one bundle, so that they are on one node."""
    ranks = spec.topology.tensor_parallel
    return {"CPU": ranks} if spec.topology.platform == "cpu" else {"GPU": ranks, "CPU": 1}


class RayOwner:
    """A pool of a Ray job, in a named actor, which all processes of the job share; with `placement: local`, those of a
    node. Ray starts the actor again if it is lost. `cls` is its class, `PoolActor`. Raises Ray's errors.
    """

    def __init__(self, spec: PoolSpec, cls: type) -> None:
        import ray
        from ray.exceptions import RayActorError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name, options = f"qreward-replicas-{spec.key}", {}
        if not spec.topology.assigned:
            node = ray.get_runtime_context().get_node_id()
            name += f"-{node[:12]}"
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        self.where = f"the actor {name} of its pool"
        self.lost: tuple[type[Exception], ...] = (RayActorError,)
        self._handle = get_or_start(name, cls, **options)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = getattr(self._handle, method).remote(*arguments).future()
        return future

    def release(self) -> None:
        """Do nothing: the actor ends with the job."""


class ReplicaActor(LocalServer):
    """The server of one replica, in an actor on its node."""

    def __init__(self, spec: PoolSpec, number: int) -> None:
        import ray

        # Ray may not have set the variables of the devices in this process (RAY_EXPERIMENTAL_NOSET_...).
        devices = replace(spec.topology, data_parallel=1, devices=tuple(ray.get_gpu_ids()), assigned=False)
        host = ray.util.get_node_ip_address()
        super().__init__(spec, number, environment=devices.environment(0), host=host)


class RayServer:
    """One start of one replica on the cluster; it runs in the actor of the pool."""

    def __init__(self, spec: PoolSpec, number: int) -> None:
        self._spec = spec
        self._number = number
        self._group: Any = None
        self._actor: Any = None
        self.url = ""

    async def start(self, weights: Weights | None = None) -> str:
        """Place the replica and start its server. Raises `ServerFailed`."""
        await in_thread(self._place)
        await self._placed()
        self._actor = await in_thread(self._start_actor)
        self.url = await _answer(self._actor.start.remote(weights))
        return self.url

    async def ended(self) -> ServerFailed:
        """Wait until the server ends, or its actor or node is lost."""
        try:
            failed: ServerFailed = await _answer(self._actor.ended.remote())
        except ServerFailed as error:
            return error
        return failed

    async def call(self, operation: str, **arguments: Any) -> Any:
        """See `LocalServer.call`. Raises `ServerFailed`."""
        if self._actor is None:
            raise ServerFailed("its actor has ended")
        return await _answer(self._actor.call.remote(operation, **arguments))

    async def stop(self) -> None:
        """End the server, its actor and its placement group. Idempotent."""
        actor, self._actor = self._actor, None
        if actor is not None:
            with suppress(Exception):  # the actor may be lost
                with anyio.fail_after(self._spec.stop_within_s + _STOP_S):
                    await _answer(actor.stop.remote())
        group, self._group = self._group, None
        await in_thread(functools.partial(_free, actor, group))

    def _place(self) -> None:
        from ray.util import get_placement_group, placement_group, remove_placement_group

        name = f"qreward-{self._spec.key}-{self._number}"
        with suppress(ValueError):  # left by an actor of the pool that was restarted
            remove_placement_group(get_placement_group(name))
        self._group = placement_group([bundle_of(self._spec)], strategy="STRICT_PACK", name=name)

    async def _placed(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + min(_PLACED_WITHIN_S, self._spec.start_within_s)
        group = self._group
        while not await in_thread(lambda: group.wait(_LOOK_EVERY_S)):
            # The pool's own limit ends the start without a reason, so this one comes before it.
            if loop.time() + _LOOK_EVERY_S >= until:
                import ray

                asked, free = _shown(bundle_of(self._spec)), _shown(await in_thread(ray.available_resources))
                problem = f"it asks for {asked} on one node; free on all nodes together: {free}"
                raise ServerFailed(f"the cluster cannot place it: {problem}")

    def _start_actor(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = bundle_of(self._spec)
        return (
            ray.remote(ReplicaActor)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=100,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
            )
            .remote(self._spec, self._number)
        )


async def _answer(reference: Any) -> Any:
    """Await what an actor answers. Raises `ServerFailed`, also if the actor or its node is lost."""
    from ray.exceptions import RayError

    try:
        return await reference
    except ServerFailed as error:
        raise ServerFailed(error.problem, error.log) from None
    except RayError as error:
        raise ServerFailed(f"its actor or node is lost ({type(error).__name__})") from None


def _free(actor: Any, group: Any) -> None:
    import ray
    from ray.util import remove_placement_group

    with suppress(Exception):  # the cluster may have lost them
        if actor is not None:
            ray.kill(actor)
    with suppress(Exception):
        if group is not None:
            remove_placement_group(group)


def _shown(resources: Mapping[str, float]) -> str:
    shown = [f"{amount:g} {name}" for name, amount in sorted(resources.items()) if name in ("CPU", "GPU")]
    return ", ".join(shown) or "nothing"
