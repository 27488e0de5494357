"""Defines `RayPoolUse`: the use of the pool of a Ray job by one process."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..named_actors import get_or_start
from .group_weights import GroupWeights
from .pool import PoolFailed
from .pool_use import PoolUse
from .ray_pool import RayPoolActor
from .spec import PoolSpec

_NONE = "no servers of it run on this Ray cluster"


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
                self._actor = self._found() if self.finds else get_or_start(self._actor_name, RayPoolActor)
                known = (self.spec.to_json(), self.weights.as_mapping(), self.asleep, not self.finds)
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
        return f"qreward-replicas-{self.spec.key}"

    def _found(self) -> Any:
        """Return the actor of the pool, of whatever job of the cluster. Raises `PoolFailed`."""
        import ray

        named = ray.util.list_named_actors(all_namespaces=True)
        jobs = [one["namespace"] for one in named if one["name"] == self._actor_name]
        if len(jobs) > 1:
            raise PoolFailed(f"{len(jobs)} jobs of the cluster have such servers, each its own; end the others first")
        try:
            return ray.get_actor(self._actor_name, namespace=jobs[0])
        except (IndexError, ValueError):
            raise PoolFailed(_NONE) from None

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

    def leave(self) -> None:
        if self._actor is not None:
            with suppress(Exception):  # Ray may be shut down
                self._actor.leave.remote(self._user)
