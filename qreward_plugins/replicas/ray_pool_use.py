"""Defines `RayPoolUse`: the use of the pool of a Ray job by one process."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..system.ray_actors import get_or_start
from .group_weights import GroupWeights
from .pool import PoolFailed
from .pool_search import START, RunningPool, chosen
from .pool_use import PoolUse
from .ray_pool import RayPoolActor
from .spec import PoolSpec

_PREFIX = "qreward-replicas-"
_DESCRIBED_WITHIN_S = 10.0
_NONE = f"no servers of it run on this Ray cluster{START}"


class RayPoolUse(PoolUse):
    """The use of the pool of a Ray job."""

    def __init__(self, spec: PoolSpec, groups: GroupWeights | None = None) -> None:
        super().__init__(spec, groups)
        self._user = secrets.token_hex(8)
        self._actor: Any = None
        self._joined = False
        """Whether the actor knows this user. It ignores the messages of others."""

    def follow(self) -> None:
        import ray
        from ray.exceptions import RayActorError

        while not self._is_leaving():
            try:
                self._actor = self._found() if self.is_guest else get_or_start(self._actor_name, RayPoolActor)
                known = (self.spec.to_json(), self.weights.as_mapping(), self.asleep, not self.is_guest)
                if not ray.get(self._actor.join.remote(self._user, *known)):
                    raise PoolFailed(_NONE)
                self._joined = True
                self._resend()
                self._listen(ray)
            except RayActorError:
                self._lost()
                self._count_loss()
            finally:
                self._joined = False
                self._lose_commands()
        if self._actor is not None:
            with suppress(Exception):  # Ray may be shut down
                ray.get(self._actor.leave.remote(self._user))

    @property
    def _actor_name(self) -> str:
        return f"{_PREFIX}{self.spec.key}"

    def _found(self) -> Any:
        """Return the actor of the pool, of whatever job of the cluster. Raises `PoolFailed`."""
        import ray

        named = ray.util.list_named_actors(all_namespaces=True)
        pools, actors = [], {}
        for one in named:
            name, job = one["name"], one["namespace"]
            if not name.startswith(_PREFIX):
                continue
            with suppress(Exception):  # it may have ended, or hang
                actor = ray.get_actor(name, namespace=job)
                if described := ray.get(actor.describe.remote(), timeout=_DESCRIBED_WITHIN_S):
                    pools.append(RunningPool.of(name, f"job {job}", described))
                    actors[len(pools) - 1] = actor
        own = [pool for pool in pools if pool.key == self._actor_name]
        if len(own) > 1:
            raise PoolFailed(f"{len(own)} jobs of the cluster have such servers, each its own; end the others first")
        meant = chosen(self.spec, self.unwritten, pools)
        if meant is None:
            raise PoolFailed(_NONE)
        if meant.topology is not None:
            self.spec = replace(self.spec, topology=meant.topology)
        return next(actors[number] for number, pool in enumerate(pools) if pool is meant)

    def _listen(self, ray: Any) -> None:
        version = -1
        while not self._is_leaving():
            report: dict[str, Any] | None = ray.get(self._actor.poll.remote(self._user, version))
            if report is None:
                return
            if "failed" in report:
                with suppress(Exception):
                    ray.get(self._actor.leave.remote(self._user))
                raise PoolFailed(report["failed"], report["log"])
            if version != report["version"]:
                version = report["version"]
                self._receive(report)
                for message in report["replies"]:
                    self._receive(message)

    def send(self, message: Mapping[str, Any]) -> bool:
        if self._joined:
            with suppress(Exception):  # Ray may be shut down
                self._actor.receive.remote(self._user, dict(message))
                return True
        return False

    def where(self) -> str:
        return f"the actor {self._actor_name} of its pool"

    def leave(self, *, at_once: bool = False) -> None:
        if self._actor is not None:
            with suppress(Exception):  # Ray may be shut down
                self._actor.leave.remote(self._user)
