"""Defines `RayServer`: one start of one server on a Ray cluster, as an actor on a placement group of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from ..errors import ConfigurationError
from ..system.private_directory import private_directory
from ..system.ray_actors import ray_is_up
from ..system.threads import in_thread
from .launch import LocalServer, ServerFailed
from .spec import PoolSpec
from .topology import Platform
from .weights import Weights

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


class ReplicaActor:
    """Runs the server of one replica on its node."""

    def __init__(self, spec: bytes, number: int) -> None:
        import ray

        self._spec = PoolSpec.from_json(spec)
        folder = self._spec.log_folder
        private: Path | None = None
        try:
            private = private_directory(self._spec.directory)
        except ConfigurationError:
            if folder is None:
                raise
        path = private / f"{self._spec.key}-logs" if private is not None and folder is None else Path(folder or ".")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._private_logs = path if folder is None else None
        self._number = number
        # Ray may not have set the variables of the devices in this process (RAY_EXPERIMENTAL_NOSET_...).
        devices = replace(self._spec.topology, data_parallel=1, devices=tuple(ray.get_gpu_ids()), assigned=False)
        host = ray.util.get_node_ip_address()
        self._server = LocalServer(
            self._spec, number, folder=path, environment=devices.environment(0), host=host, private=private
        )

    async def start(self, weights: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return the URL once the server is ready; or "", the problem and the end of the log."""
        try:
            return await self._server.start(Weights(**weights)), "", ""
        except ServerFailed as error:
            return "", error.problem, error.log

    async def ended(self) -> tuple[str, str]:
        """Wait for the end of the server; return the problem and the end of its log."""
        failed = await self._server.ended()
        return failed.problem, failed.log

    async def call(self, operation: str, arguments: Mapping[str, Any]) -> tuple[Any, str, str]:
        """See `LocalServer.call`. Return the result, "" and ""; or None, the problem and the end of the log."""
        try:
            return await self._server.call(operation, **arguments), "", ""
        except ServerFailed as error:
            return None, error.problem, error.log

    async def stop(self) -> None:
        """See `LocalServer.stop`. Logs that nobody asked to keep are removed."""
        await self._server.stop()
        if self._private_logs is not None:
            await in_thread(functools.partial(_remove_logs, self._private_logs, self._spec, self._number))


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
        from ray.exceptions import RayError

        await in_thread(self._place)
        await self._placed()
        self._actor = await in_thread(self._start_actor)
        try:
            url, problem, log = await self._actor.start.remote((weights or Weights()).as_mapping())
        except RayError as error:
            raise ServerFailed(_lost(error)) from None
        if problem:
            raise ServerFailed(problem, log)
        self.url = url
        return self.url

    async def ended(self) -> ServerFailed:
        """Wait until the server ends, or its actor or node is lost."""
        from ray.exceptions import RayError

        try:
            problem, log = await self._actor.ended.remote()
        except RayError as error:
            return ServerFailed(_lost(error))
        return ServerFailed(problem, log)

    async def call(self, operation: str, **arguments: Any) -> Any:
        """See `LocalServer.call`. Raises `ServerFailed`."""
        from ray.exceptions import RayError

        if self._actor is None:
            raise ServerFailed("its actor has ended")
        try:
            result, problem, log = await self._actor.call.remote(operation, arguments)
        except RayError as error:
            raise ServerFailed(_lost(error)) from None
        if problem:
            raise ServerFailed(problem, log)
        return result

    async def stop(self) -> None:
        """End the server, its actor and its placement group. Idempotent."""
        actor, self._actor = self._actor, None
        if actor is not None:
            with suppress(Exception):  # the actor may be lost
                with anyio.fail_after(self._spec.stop_within_s + _STOP_S):
                    await _ended(actor.stop.remote())
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
                asked = _shown(bundle_of(self._spec))
                free = await in_thread(_free_resources)
                raise ServerFailed(f"the cluster cannot place it: it asks for {asked} on one node; free: {free}")

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
            .remote(self._spec.to_json(), self._number)
        )


async def _ended(reference: Any) -> Any:
    return await reference


def _remove_logs(folder: Path, spec: PoolSpec, number: int) -> None:
    for path in folder.glob(f"{spec.file_name}-{number}.log*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # another replica of this node has its log there
        folder.rmdir()


def _free(actor: Any, group: Any) -> None:
    import ray
    from ray.util import remove_placement_group

    with suppress(Exception):  # the cluster may have lost them
        if actor is not None:
            ray.kill(actor)
    with suppress(Exception):
        if group is not None:
            remove_placement_group(group)


def _free_resources() -> str:
    """The resources that are free on each node, for people."""
    import ray
    from ray._private.state import available_resources_per_node

    try:
        free = available_resources_per_node()
    except Exception:  # a function of Ray that is not public
        return _shown(ray.available_resources())
    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return "; ".join(f"{name}: {_shown(free.get(node, {}))}" for node, name in names.items()) or "no node"


def _shown(resources: Mapping[str, float]) -> str:
    shown = [f"{amount:g} {name}" for name, amount in sorted(resources.items()) if name in ("CPU", "GPU")]
    return ", ".join(shown) or "nothing"


def _lost(error: Exception) -> str:
    return f"its actor or node is lost ({type(error).__name__})"
