"""`qreward pool`: looks at the running servers of sources of kind `replicas`, and changes them.

It finds the servers that a training or `qreward serve-judge` has started, and starts none.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import load_config
from ..errors import InputError
from ..named_actors import in_thread, join_cluster
from ..redaction import one_line
from ..replicas.pool_status import PoolStatus, ReplicaLoad
from ..replicas.replica_state import ReplicaState
from ..replicas.spec import PoolSpec
from .figures import print_whole, short
from .running import OK, say
from .servers import opened_servers, said_of

_WIDEST_VERSION = 24
_RIGHT = ("replica", "requests", "pending tokens", "hit rate", "restarts")


class PoolSource(Protocol):
    """A source that finds servers; see `ReplicaSet`."""

    name: str

    @property
    def spec(self) -> PoolSpec: ...

    async def find(self) -> None: ...

    async def status(self) -> PoolStatus: ...

    async def sleep(self, *, level: int, drain: Any, within_s: float) -> None: ...

    async def wake_up(self) -> None: ...

    async def update_weights(self, path: Path, *, version: str, mode: Any, drain: Any, within_s: float) -> object: ...

    async def aclose(self) -> None: ...


async def show_status(path: Path, names: Sequence[str], out: Console, *, as_json: bool) -> int:
    """Print the status of the servers. Raises `ConfigurationError`, `InputError` and `ReplicasNotStarted`."""
    async with _found(path, names) as sources:
        statuses = await asyncio.gather(*(source.status() for source in sources))
        if as_json:
            found = [_as_json(source, status) for source, status in zip(sources, statuses, strict=True)]
            say(out, json.dumps({"sources": found}, indent=2))
            return OK
        for source, status in zip(sources, statuses, strict=True):
            _show(source, status, out)
    return OK


async def sleep(
    path: Path, names: Sequence[str], out: Console, errors: Console, *, level: int, drain: str, within_s: float
) -> int:
    """Let the servers free their devices. Raises as `show_status` does, and `ReplicasNotChanged`."""
    async with _found(path, names) as sources:
        with errors.status("the servers end their calls and go to sleep ..."):
            await asyncio.gather(*(source.sleep(level=level, drain=drain, within_s=within_s) for source in sources))
        for source in sources:
            say(out, f"{source.name}: the servers sleep; wake them with: qreward pool wake {path}")
    return OK


async def wake(path: Path, names: Sequence[str], out: Console, errors: Console) -> int:
    """Let the servers take calls again. Raises as `sleep` does."""
    async with _found(path, names) as sources:
        with errors.status("the servers wake up ..."):
            await asyncio.gather(*(source.wake_up() for source in sources))
        for source in sources:
            say(out, f"{source.name}: the servers are awake")
    return OK


async def update(path: Path, name: str | None, weights: Path, out: Console, errors: Console, **how: Any) -> int:
    """Give the servers of one source other weights. `how`: see `RewardEngine.update_weights`. Raises as `sleep` does,
    and `InputError` if several sources could be meant.
    """
    async with _found(path, () if name is None else (name,), only_one=True) as (source,):
        try:
            with errors.status("the servers get other weights ..."):
                await source.update_weights(weights, **how)
        except ValueError as error:
            raise InputError(str(error)) from None
        said = f" as {how['version']}" if how["version"] else ""
        say(out, f"{source.name}: the servers have the weights of {weights}{said}")
    return OK


@asynccontextmanager
async def _found(path: Path, names: Sequence[str], *, only_one: bool = False) -> AsyncIterator[list[PoolSource]]:
    """Find the servers of all sources, before those of one are changed."""
    config = load_config(path)
    meant = [config.sources[name] for name in names if name in config.sources] or config.sources.values()
    if any(getattr(source, "placement", "") == "ray" for source in meant):
        try:
            await in_thread(join_cluster)
        except ConnectionError as error:
            raise InputError(f"the servers run on Ray, and there is no cluster to be joined: {error}") from None
    sources: list[PoolSource] = opened_servers(config, path, names)
    try:
        if only_one and len(sources) > 1:
            known = ", ".join(source.name for source in sources)
            raise InputError(f"{path}: several sources have servers; name one of them by --source: {known}")
        await asyncio.gather(*(source.find() for source in sources))
        yield sources
    finally:
        await asyncio.gather(*(source.aclose() for source in sources))


def _show(source: PoolSource, status: PoolStatus, out: Console) -> None:
    weights = status.weights
    version = f", weights {weights.version or 'updated'} ({weights.path or 'from memory'})" if weights.revision else ""
    say(out, f"{source.name}: {said_of(source.spec)}{version}")
    silent = f"; {status.silent} of them did not answer, and their requests are missing" if status.silent else ""
    processes = f"{status.processes} process{'' if status.processes == 1 else 'es'}"
    say(out, f"used by {processes}{silent}")
    print_whole(out, _table(status))
    for state in status.replicas:
        if state.problem:
            say(out, f"replica {state.number}: {one_line(state.problem, 1000)}")


def _table(status: PoolStatus) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    heads = ("replica", "address", "devices", "state", "version", *_RIGHT[1:4], "health", "restarts")
    for head in heads:
        table.add_column(head, no_wrap=head not in ("devices", "health"), justify="right" if head in _RIGHT else "left")
    for state in status.replicas:
        table.add_row(*map(Text, _row(state, status)))
    return table


def _row(state: ReplicaState, status: PoolStatus) -> Sequence[str]:
    load = status.loads.get(state.number, ReplicaLoad())
    version = one_line(state.version, 200)
    return (
        str(state.number),
        state.url or "-",
        state.devices,
        state.state,
        (version if len(version) <= _WIDEST_VERSION else f"...{version[3 - _WIDEST_VERSION :]}") or "-",
        short(load.requests),
        # Tokens are estimated only where there is a choice between replicas.
        short(load.pending_tokens) if len(status.replicas) > 1 else "-",
        f"{load.prefix_hits / load.prefix_tokens:.0%}" if load.prefix_tokens else "-",
        _health(load),
        str(state.restarts),
    )


def _health(load: ReplicaLoad) -> str:
    """What all processes see, or how many see what: "up", "up 7, backing off 1"."""
    seen = Counter(load.health).most_common()
    if len(seen) == 1:
        return seen[0][0].replace("_", " ")
    return ", ".join(f"{health.replace('_', ' ')} {count}" for health, count in seen) or "-"


def _as_json(source: PoolSource, status: PoolStatus) -> dict[str, Any]:
    values = status.as_mapping()
    replicas = []
    for state in status.replicas:
        load = status.loads.get(state.number, ReplicaLoad())
        kept = ("url", "devices", "state", "version", "restarts", "problem")
        replicas.append(
            {
                "replica": state.number,
                **{name: getattr(state, name) for name in kept},
                "requests": load.requests,
                "in_flight": load.in_flight,
                "pending_tokens": load.pending_tokens,
                "prefix_hit_rate": load.prefix_hits / load.prefix_tokens if load.prefix_tokens else None,
                "health": dict(load.health),
            }
        )
    kept_weights = {name: values["weights"][name] for name in ("version", "path", "revision")}
    return {
        "source": source.name,
        "model": source.spec.model,
        "weights": kept_weights,
        "processes": status.processes,
        "silent": status.silent,
        "replicas": replicas,
    }
