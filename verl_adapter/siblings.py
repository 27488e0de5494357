"""Scores samples that a judge compares with their siblings (kind `rank`), though verl's reward workers get them one by
one.

No worker waits for siblings. It hands its sample to an actor of the Ray job and returns at once, with a mark
(`PENDING`). The actor scores a group as soon as all of its samples are there, beside the generation that goes on. The
hook in the trainer's process collects the rewards before it computes advantages (`Advantages`), and then has what is
there of a group scored: with agent loops that sample more or less often, its size is not known before. A sample that
the actor does not know, because it was restarted, is a failed one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from qreward_plugins import Cause, Failed, Outcome, Sample
from qreward_plugins.adapters import described_error, shared_actor

from .rewards import Told

if TYPE_CHECKING:
    from .manager import QRewardManager

_log = logging.getLogger("verl_adapter")

PENDING = Failed(Cause.INFRA, "pending", "its siblings were not compared before the advantages were computed")
"""What a reward worker says of a sample that is compared with its siblings later."""

_ACTOR = "qreward-siblings"
_KEPT = 65_536
"""Most samples whose rewards wait to be collected, and most groups that wait for samples; the oldest are dropped first,
such as those of groups that verl dropped."""
_MARGIN_S = 60.0
"""Seconds beyond the deadline of a batch after which the actor counts as lost."""


class GroupsActor:
    """An actor of Ray that collects the samples of each group, and scores it as one batch. Its async methods are served
    on one event loop, which is that of its engine. Ray restarts it with the same arguments.
    """

    def __init__(self, manager: type[QRewardManager], config: DictConfig, address: str | None) -> None:
        self._manager = manager(config, None, reward_router_address=address)
        self._waiting: dict[str, list[Sample]] = {}
        self._scored: OrderedDict[str, tuple[asyncio.Task[list[Outcome]], int, Sample]] = OrderedDict()
        """By the ids of samples: the outcomes of a group, and which of them it is."""

    async def add(self, sample: Sample, size: int) -> None:
        """Add a sample of a group of `size`. Does not wait for its reward."""
        group = self._waiting.setdefault(str(sample.group_id), [])
        group.append(sample)
        if len(self._waiting) > _KEPT:
            del self._waiting[next(iter(self._waiting))]
        if len(group) >= size:
            self._score(str(sample.group_id))

    async def collect(self, ids: Sequence[str]) -> dict[str, Told]:
        """What became of these samples, by their ids; those that it does not know are missing. Waits until all are
        scored. Groups of which samples have not come are scored without them. Raises what ends a run.
        """
        wanted = set(ids)
        for group in [group for group, some in self._waiting.items() if wanted & {str(each.id) for each in some}]:
            self._score(group)
        found = [self._scored.pop(each) for each in ids if each in self._scored]
        return {str(sample.id): self._manager.told(sample, (await batch)[place]) for batch, place, sample in found}

    async def aclose(self) -> None:
        """Close the engine. Ray never does; stand-ins do."""
        await self._manager.aclose()

    def _score(self, group: str) -> None:
        samples = self._waiting.pop(group)
        batch = asyncio.ensure_future(self._manager.engine.score_all(samples))
        for place, sample in enumerate(samples):
            self._scored[str(sample.id)] = (batch, place, sample)
        while len(self._scored) > _KEPT:
            self._scored.popitem(last=False)


class HandOver:
    """Hands the samples of a reward worker to the actor of its run."""

    def __init__(self, manager: type[QRewardManager], config: DictConfig, address: str | None) -> None:
        self._arguments = (manager, config, address)
        self._size = int(OmegaConf.select(config, "actor_rollout_ref.rollout.n") or 1)
        self._actor: Any = None

    async def add(self, sample: Sample) -> Outcome:
        """Hand a sample over. Returns `PENDING`, or why it failed."""
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(shared_actor, _ACTOR, GroupsActor, arguments=self._arguments)
            await self._actor.add.remote(sample, self._size)
        except Exception as error:
            self._actor = None
            return Failed(Cause.INFRA, "siblings", f"the actor that compares siblings failed: {described_error(error)}")
        return PENDING


def collected(ids: Sequence[str], *, deadline_s: float) -> Mapping[str, Told]:
    """What became of samples that were handed over, by their ids. Blocks, at most for `deadline_s` and a margin.

    A sample is missing if the actor does not know it, or does not answer, which is logged.
    """
    import ray

    try:
        told: dict[str, Told] = ray.get(ray.get_actor(_ACTOR).collect.remote(ids), timeout=deadline_s + _MARGIN_S)
    except ray.exceptions.RayTaskError:
        raise  # such as `RewardMissing`, with `on_failure: raise`
    except Exception as error:
        _log.warning("%d samples were not compared with their siblings (%s)", len(ids), described_error(error))
        return {}
    return told
