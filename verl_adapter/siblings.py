"""Scores samples that a judge compares with their siblings (kind `rank`), though verl's reward workers get them one by
one.

No worker waits for siblings. It hands its sample to an actor of the Ray job and returns at once, with a mark
(`PENDING`). The actor scores a group as soon as all of its samples are there, beside the generation that goes on. The
hook in the trainer's process collects the rewards before it computes advantages (`Advantages`), and then has what is
there of a group scored: with agent loops that sample more or less often, its size is not known before. A sample that
the actor does not know, because it was restarted, is a failed one. Without Ray, as in tests, an object of the process
is in the place of the actor.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from qreward_plugins import Cause, Failed, Outcome, Sample
from qreward_plugins.adapters import Gathering, described_error, ray_is_up, shared_actor

if TYPE_CHECKING:
    from .manager import QRewardManager

_log = logging.getLogger("verl_adapter")

PENDING = Failed(Cause.INFRA, "pending", "its siblings were not compared before the advantages were computed")
"""What a reward worker says of a sample that is compared with its siblings later."""

Told = dict[str, Any]
"""What `QRewardManager.run_single` returns."""

_ACTOR = "qreward-siblings"
_KEPT = 65_536
"""Most samples whose rewards wait to be collected; the oldest are dropped first, such as those of groups that verl
dropped."""
_MARGIN_S = 60.0
"""Seconds beyond the deadline of a batch after which the actor counts as lost."""


_lock = threading.Lock()
_here: dict[str, Groups] = {}
"""Without Ray, the groups of this process, by the configuration of their run."""


class NotOpen(Exception):
    """The actor has no engine: it was started, or restarted after its process was lost."""


class Groups:
    """The groups that are scored by the engine of `manager`. Thread-safe."""

    def __init__(self, manager: QRewardManager) -> None:
        self._manager = manager
        self._opened = ExitStack()
        self._gathering = Gathering(self._opened.enter_context(manager.engine.portal()))
        self._lock = threading.Lock()
        self._added: OrderedDict[str, tuple[Sample, Future[Outcome]]] = OrderedDict()
        """By the ids of samples."""

    def add(self, sample: Sample, size: int) -> None:
        """Add a sample of a group of `size`. Does not wait."""
        with self._lock:
            self._added[str(sample.id)] = sample, self._gathering.add(sample, size)
            while len(self._added) > _KEPT:
                _, (_, dropped) = self._added.popitem(last=False)
                dropped.cancel()

    def collect(self, ids: Sequence[str]) -> dict[str, Told]:
        """What became of these samples, by their ids; those that it does not know are missing. Blocks until all are
        scored. Groups of which samples have not come are scored without them.
        """
        self._gathering.release(set(ids))
        with self._lock:
            found = {each: self._added.pop(each) for each in ids if each in self._added}
        return {each: self._manager.told(sample, outcome.result()) for each, (sample, outcome) in found.items()}

    def close(self) -> None:
        """Close the engine."""
        self._opened.close()


class GroupsActor:
    """`Groups` as an actor of Ray, whose async methods are served on one event loop."""

    def __init__(self) -> None:
        self._groups: Groups | None = None

    async def open(self, manager: type[QRewardManager], config: DictConfig, address: str | None) -> None:
        """Make the engine, unless there is one. Raises `ConfigurationError`."""
        if self._groups is None:
            self._groups = Groups(manager(config, None, reward_router_address=address))

    async def add(self, sample: Sample, size: int) -> None:
        """Add a sample. Raises `NotOpen`."""
        if self._groups is None:
            raise NotOpen
        self._groups.add(sample, size)

    async def collect(self, ids: Sequence[str]) -> dict[str, Told]:
        """What became of these samples."""
        return {} if self._groups is None else await asyncio.to_thread(self._groups.collect, ids)

    async def aclose(self) -> None:
        """Close the engine. Ray never does; stand-ins do."""
        if self._groups is not None:
            await asyncio.to_thread(self._groups.close)


class HandOver:
    """Hands the samples of a reward worker to the groups of its run."""

    def __init__(self, manager: type[QRewardManager], config: DictConfig, address: str | None) -> None:
        self._opening = (manager, config, address)
        self._size = size_of(config)

    async def add(self, sample: Sample) -> Outcome:
        """Hand a sample over. Returns `PENDING`, or why it failed."""
        try:
            if ray_is_up():
                await self._to_actor(sample)
            else:
                self._here().add(sample, self._size)
        except Exception as error:
            detail = f"what compares samples with their siblings does not answer: {described_error(error)}"
            return Failed(Cause.INFRA, "siblings", detail)
        return PENDING

    def close(self) -> None:
        """Close the groups of this process."""
        with _lock:
            groups = _here.pop(_key_of(self._opening[1]), None)
        if groups is not None:
            groups.close()

    async def _to_actor(self, sample: Sample) -> None:
        import ray

        actor = await asyncio.to_thread(shared_actor, _ACTOR, GroupsActor)
        try:
            await actor.add.remote(sample, self._size)
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, NotOpen):
                raise
            await actor.open.remote(*self._opening)
            await actor.add.remote(sample, self._size)

    def _here(self) -> Groups:
        manager, config, address = self._opening
        with _lock:
            key = _key_of(config)
            if key not in _here:
                _here[key] = Groups(manager(config, None, reward_router_address=address))
            return _here[key]


def collected(ids: Sequence[str], *, deadline_s: float) -> Mapping[str, Told]:
    """What became of samples that were handed over, by their ids. Blocks, at most for `deadline_s` and a margin.

    A sample is missing if the actor does not know it, or does not answer, which is logged.
    """
    if not ray_is_up():
        with _lock:
            here = list(_here.values())
        return {each: told for groups in here for each, told in groups.collect(ids).items()}
    import ray

    try:
        asked = shared_actor(_ACTOR, GroupsActor).collect.remote(ids)
        told: dict[str, Told] = ray.get(asked, timeout=deadline_s + _MARGIN_S)
    except ray.exceptions.RayTaskError:
        raise  # such as `RewardMissing`, with `on_failure: raise`
    except Exception as error:
        _log.warning("%d samples were not compared with their siblings (%s)", len(ids), described_error(error))
        return {}
    return told


def size_of(config: DictConfig) -> int:
    """How many samples a group has."""
    return int(OmegaConf.select(config, "actor_rollout_ref.rollout.n") or 1)


def _key_of(config: DictConfig) -> str:
    return OmegaConf.to_yaml(config)
