"""Starts the servers of sources of kind `replicas` for a command, and shows their topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import Config
from ..engine import RewardEngine
from ..errors import InputError
from ..replicas import PoolSpec, ReplicaState
from ..sources import kind_of, open_source
from .console import say
from .engines import ended_by_a_signal, join_ray


class ServerSource(Protocol):
    """A source that starts servers of its own; see `SourceKind.has_servers`."""

    name: str

    @property
    def spec(self) -> PoolSpec: ...

    @property
    def replicas(self) -> tuple[ReplicaState, ...]: ...

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...


def opened_servers(config: Config, path: Path, names: Sequence[str]) -> list[Any]:
    """Open the sources `names` of a configuration, or all that start servers of their own. Nothing is started.

    Raises `ConfigurationError`, and `InputError` for a name that is not such a source, and if one is to be placed on
    Ray and no cluster runs.
    """
    known = [name for name, source in config.sources.items() if kind_of(source).has_servers]
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        missing = f"--source {unknown[0]}: it is no source" if unknown else f"{path}: there is no source"
        raise InputError(f"{missing} of kind replicas" + (f"; such sources: {', '.join(known)}" if known else ""))
    with ended_by_a_signal():
        join_ray(config, path, names or known)
    return [open_source(name, config.sources[name]) for name in dict.fromkeys(names or known)]


async def start_servers(engine: RewardEngine, out: Console, errors: Console) -> None:
    """Print the topology of each source of kind `replicas`, start its servers, and print their ports.

    Raises `ReplicasNotStarted`.
    """
    for name, source in sources_with_servers(engine).items():
        say(out, f"{name}: {said_of(source.spec)}")
        with errors.status(f"starting the servers of {name} ..."):
            await source.start()
        out.print(topology_table(source.replicas))


def sources_with_servers(engine: RewardEngine) -> Mapping[str, ServerSource]:
    """The sources that start servers of their own, by name."""
    found: dict[str, Any] = {name: upstream.source for name, upstream in engine.upstreams.items()}
    return {name: source for name, source in found.items() if getattr(type(source), "has_servers", False)}


def said_of(spec: PoolSpec) -> str:
    """Describe a pool in one line."""
    topology = spec.topology
    replicas = "1 replica" if topology.data_parallel == 1 else f"{topology.data_parallel} replicas"
    shards = "" if topology.tensor_parallel == 1 else f" x {topology.tensor_parallel} devices"
    return f"{replicas}{shards} of {spec.model} on {spec.server} ({topology.platform})"


def topology_table(states: Sequence[ReplicaState]) -> Table:
    """A row for each replica: its devices and its port."""
    table = Table("replica", "devices", "port", "address", box=None, padding=(0, 1), pad_edge=False)
    for state in states:
        port = urlsplit(state.url).port if state.url else None
        table.add_row(
            str(state.number), Text(state.devices), "" if port is None else str(port), Text(state.url or state.state)
        )
    return table
