"""Chooses among the pools that run the one that a configuration means, for a process that starts none.

Engines share a pool only if their whole specs are equal. A shell is another process: it has no `CUDA_VISIBLE_DEVICES`
of the training, and not its keys. So only what the configuration itself says is compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .pool import PoolFailed
from .spec import PoolSpec
from .topology import Topology

START = ". `qreward serve-judge` starts them, or the first sample of a training"
"""Said where no pool of a source runs."""
_UNSEEN = frozenset({"directory"})
"""Fields that tell no pools apart: whoever looks in a directory has found it."""
_KEYS: Mapping[str, str] = {"in_place": "weight_updates", "assigned": "placement"}
"""The keys of the configuration for fields of a spec that have another name."""


@dataclass(frozen=True)
class RunningPool:
    """A pool that runs. `where` names its process for people, and `key` finds it."""

    key: str
    where: str
    digests: Mapping[str, str]
    topology: Topology | None = None

    @classmethod
    def of(cls, key: str, where: str, described: Mapping[str, Any]) -> RunningPool:
        """Make it of what `describe` has returned in its process."""
        fields = dict(described)
        topology = fields.pop("topology", None)
        if isinstance(topology, Mapping):
            topology = Topology(**{**topology, "devices": tuple(topology["devices"])})
        return cls(key, where, fields, topology)

    def differs(self, digests: Mapping[str, str]) -> frozenset[str]:
        """Return the names of the fields in which it differs from a spec with these digests."""
        names = (self.digests.keys() | digests.keys()) - _UNSEEN
        return frozenset(name for name in names if self.digests.get(name) != digests.get(name))

    def shown(self) -> str:
        """Name it, with its devices."""
        devices = ", ".join(map(str, self.topology.devices)) if self.topology is not None else ""
        return f"{self.where} with the devices {devices}" if devices else self.where


def describe(spec: PoolSpec) -> dict[str, Any]:
    """Return what another process may know of a pool: what differs, and no secret."""
    return {**spec.digests, "topology": asdict(spec.topology)}


def chosen(spec: PoolSpec, unwritten: Collection[str], pools: Sequence[RunningPool]) -> RunningPool | None:
    """Return the pool that a configuration means; None if no pool of this source runs.

    `unwritten` are the fields that the configuration leaves to the environment, and the first words of such fields
    ("environment" stands for "environment.HF_TOKEN"). Raises `PoolFailed` that names the differences if none fits, or
    several do.
    """
    digests = spec.digests
    own = [(pool, pool.differs(digests)) for pool in pools if pool.digests.get("name") == spec.name]
    fitting = [pool for pool, differs in own if all(_is_in(name, unwritten) for name in differs)]
    # A shell is in another directory than the training. Otherwise its environment may be the same.
    same = [pool for pool in fitting if pool.differs(digests) <= {"log_folder"}]
    fitting = same or fitting
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        first, *others = fitting
        differs = frozenset().union(*(first.differs(other.digests) for other in others))
        problem = f"{len(fitting)} pools of {spec.name!r} run that this configuration may mean: "
        problem += "; ".join(pool.shown() for pool in fitting)
        remedy = "Write these keys, or use the environment of the process that started the one you mean"
        raise PoolFailed(f"{problem}. They differ in: {_listed(differs)}. {remedy}")
    if own:
        said = "; ".join(f"{pool.shown()} differs in: {_listed(_seen(differs, unwritten))}" for pool, differs in own)
        problem = f"no servers with this configuration run; those of another source {spec.name!r} run"
        raise PoolFailed(f"{problem}: {said}. Use the configuration of the process that started them")
    return None


def _seen(differs: Collection[str], unwritten: Collection[str]) -> list[str]:
    return [name for name in differs if not _is_in(name, unwritten)]


def _is_in(name: str, fields: Collection[str]) -> bool:
    return name in fields or name.partition(".")[0] in fields


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(_KEYS.get(name, name) for name in names))
