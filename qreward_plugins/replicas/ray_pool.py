"""The pool of a Ray job: a named actor that starts each replica as an actor on a placement group of its own.

The first process of a job that needs the pool starts the actor, the others find it by its name. It stops the servers
when its last user leaves, and ends with the job. A replica whose actor or node is lost is placed and started again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio

from ..named_actors import get_or_start, in_thread, ray_is_up
from .commands import Commands
from .group_weights import GroupWeights
from .launch import LocalServer, ServerFailed
from .pool import Pool, PoolFailed
from .pool_use import PoolUse
from .runtime_folder import runtime_folder
from .spec import PoolSpec
from .topology import Platform
from .weights import Weights

_log = logging.getLogger("qreward_plugins.replicas")

_PLACED_WITHIN_S = 120.0
"""Seconds that the cluster has to place a replica. An autoscaler takes a minute to add a node."""
_LOOK_EVERY_S = 1.0
_NEWS_WITHIN_S = 30.0
_SILENT_S = 60.0
"""Seconds without a question for news after which nobody waits for a user: Ray does not tell that a process ended."""
_STOP_S = 60.0
_LOST_TRIES = 3


def cluster_platform() -> Platform:
    """The platform of the nodes of the Ray cluster of this process. Ray itself sets the variables of the devices."""
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
        path = Path(folder) if folder is not None else runtime_folder() / f"{self._spec.key}-logs"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._private_logs = path if folder is None else None
        self._number = number
        # Ray has set the variables of the devices in this process.
        host = ray.util.get_node_ip_address()
        self._server = LocalServer(self._spec, number, folder=path, environment={}, host=host)

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

    async def tell(self, order: str, details: Mapping[str, Any]) -> tuple[Any, str, str]:
        """See `LocalServer.tell`. Return the result, "" and ""; or None, the problem and the end of the log."""
        try:
            return await self._server.tell(order, **details), "", ""
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

    async def tell(self, order: str, **details: Any) -> Any:
        """See `LocalServer.tell`. Raises `ServerFailed`."""
        from ray.exceptions import RayError

        if self._actor is None:
            raise ServerFailed("its actor has ended")
        try:
            result, problem, log = await self._actor.tell.remote(order, details)
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


class RayPoolActor:
    """The pool of a job; started by `get_or_start`. Users join it with its spec, and ask for news."""

    def __init__(self) -> None:
        self._users: set[str] = set()
        self._silent: set[str] = set()
        """Users that have asked for no news for a while."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._pool: Pool | None = None
        self._commands = Commands(self._heard_of)
        self._said: dict[str, list[dict[str, Any]]] = {}
        """By user: the answers to its commands that it has not fetched yet."""
        self._version = 0
        self._ready = False
        self._failed: PoolFailed | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def join(self, user: str, spec: bytes, weights: Mapping[str, Any], asleep: bool) -> None:
        """Begin a use of the pool. The first one starts it, with the `weights` that an earlier pool of its user had."""
        while self._stopping is not None:
            await asyncio.wait([self._stopping])
        self._users.add(user)
        if self._pool is None:
            known = PoolSpec.from_json(spec)
            self._ready, self._failed = False, None
            commands = self._commands = Commands(self._heard_of)
            self._pool = Pool(
                known,
                lambda number: RayServer(known, number),
                on_change=self._change,
                idle=commands.idle,
                weights=Weights(**weights),
                asleep=asleep,
            )
            self._starting = asyncio.ensure_future(self._start(self._pool))
            commands.serve(self._pool, self._starting)
        else:
            self._pool.learn(Weights(**weights))

    async def hear(self, user: str, message: Mapping[str, Any]) -> None:
        """Handle a message of a user; see `Commands.heard`."""
        if user in self._users:
            self._commands.heard(user, message, functools.partial(self._say, user))

    def _say(self, user: str, message: dict[str, Any]) -> None:
        self._said.setdefault(user, []).append(message)
        self._change()

    def _heard_of(self) -> set[str]:
        return self._users - self._silent

    def _listens(self, user: str) -> None:
        """Note that a user is there."""
        self._silent.discard(user)
        if (timer := self._timers.pop(user, None)) is not None:
            timer.cancel()

    def _falls_silent(self, user: str) -> None:
        self._timers.pop(user, None)
        self._silent.add(user)
        self._commands.left(user)

    async def news(self, user: str, version: int) -> dict[str, Any] | None:
        """Wait for a change after `version`, for a while; return what is known then. None for a user that has not
        joined, or has left.
        """
        self._listens(user)
        if user in self._users and version == self._version:
            with anyio.move_on_after(_NEWS_WITHIN_S):
                await self._changed.wait()
        self._listens(user)
        if user in self._users:
            self._timers[user] = asyncio.get_running_loop().call_later(_SILENT_S, self._falls_silent, user)
        if user not in self._users or self._pool is None:
            return None
        if self._failed is not None:
            return {"failed": self._failed.problem, "log": self._failed.log}
        states = [state.as_mapping() for state in self._pool.states]
        said = self._said.pop(user, [])
        weights = self._pool.weights.as_mapping()
        return {"version": self._version, "replicas": states, "weights": weights, "ready": self._ready, "said": said}

    async def leave(self, user: str) -> None:
        """End a use. The last one stops the servers, and returns when they have ended."""
        self._users.discard(user)
        self._listens(user)
        self._said.pop(user, None)
        self._commands.left(user)
        if not self._users and self._pool is not None and self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(self._pool))
        if self._stopping is not None and not self._users:
            await asyncio.wait([self._stopping])
        self._change()

    async def _start(self, pool: Pool) -> None:
        try:
            await pool.start()
            self._ready = True
        except PoolFailed as error:
            self._failed = error
        except Exception as error:
            _log.exception("the pool cannot be started")
            self._failed = PoolFailed(f"the pool cannot be started ({type(error).__name__}: {error})")
        self._change()

    async def _stop(self, pool: Pool) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self._commands.aclose()
        await pool.stop()
        self._pool, self._stopping = None, None

    def _change(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()


class RayPoolUse(PoolUse):
    """The use of the pool of a Ray job."""

    def __init__(self, spec: PoolSpec, groups: GroupWeights | None = None) -> None:
        super().__init__(spec, groups)
        self._user = secrets.token_hex(8)
        self._actor: Any = None
        self._joined = False
        """Whether the actor knows this user. It ignores what others say."""

    def follow(self) -> None:
        import ray
        from ray.exceptions import RayActorError

        lost = 0
        while not self._left():
            try:
                self._actor = get_or_start(f"qreward-replicas-{self.spec.key}", RayPoolActor)
                ray.get(
                    self._actor.join.remote(self._user, self.spec.to_json(), self.weights.as_mapping(), self.asleep)
                )
                self._joined = True
                self._listen(ray)
            except RayActorError:
                lost += 1
                self._lost()
                if lost > _LOST_TRIES:
                    raise PoolFailed("the actor of the pool has ended too often") from None
                _log.warning("the pool of %s has ended; it is started again", self.spec.name)
            finally:
                self._joined = False
                self._lose_commands()
        if self._actor is not None:
            with suppress(Exception):  # Ray may be shut down
                ray.get(self._actor.leave.remote(self._user))

    def _listen(self, ray: Any) -> None:
        version = -1
        while not self._left():
            news: dict[str, Any] | None = ray.get(self._actor.news.remote(self._user, version))
            if news is None:
                return
            if "failed" in news:
                with suppress(Exception):
                    ray.get(self._actor.leave.remote(self._user))
                raise PoolFailed(news["failed"], news["log"])
            if version != news["version"]:
                version = news["version"]
                self._heard(news)
                for message in news["said"]:
                    self._heard(message)

    def say(self, message: Mapping[str, Any]) -> bool:
        if self._joined:
            with suppress(Exception):  # Ray may be shut down
                self._actor.hear.remote(self._user, dict(message))
                return True
        return False

    def leave(self) -> None:
        if self._actor is not None:
            with suppress(Exception):  # Ray may be shut down
                self._actor.leave.remote(self._user)


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
