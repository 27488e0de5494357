"""`qreward pool`: looks at the running servers of sources of kind `replicas`, and changes them.

It finds the servers that a training or `qreward serve-judge` has started, and starts none.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import Config, load_config
from ..config.environment import environment_of
from ..errors import ConfigurationError, InputError, QRewardError
from ..replicas.orphans import Orphan, find_orphans
from ..replicas.pool_status import PoolStatus, ReplicaLoad
from ..replicas.replica_state import ReplicaState
from ..replicas.spec import PoolSpec
from ..secrets import one_line
from ..system.private_directory import private_directory
from .figures import print_whole, short
from .running import OK, say
from .servers import opened_servers, said_of

_WIDEST_VERSION = 24
_NOT_SET = "variable-that-is-not-set"
_RIGHT = ("replica", "requests", "pending tokens", "hit rate", "restarts")


class PoolSource(Protocol):
    """A source that finds servers; see `ReplicaSet`."""

    name: str

    @property
    def spec(self) -> PoolSpec: ...

    @property
    def asleep(self) -> bool: ...

    async def find(self) -> None: ...

    async def status(self) -> PoolStatus: ...

    async def sleep(self, *, level: int, drain: Any, within_s: float) -> None: ...

    async def wake_up(self) -> None: ...

    async def update_weights(self, path: Path, *, version: str, mode: Any, drain: Any, within_s: float) -> object: ...

    async def aclose(self) -> None: ...


async def show_status(path: Path, names: Sequence[str], out: Console, errors: Console, *, as_json: bool) -> int:
    """Print the status of the servers, also if those of another source do not run, and name this user's
    unsupervised servers on this machine. Raises `ConfigurationError`, `InputError` and, if no servers run,
    `ReplicasNotStarted`.
    """
    async with _opened(path, names) as (config, sources):
        orphans = [
            orphan
            for orphan in find_orphans(private_directory(config.engine.shared_directory))
            if not names or orphan.source in names
        ]
        for orphan in orphans if not as_json else ():
            say(errors, _said_of_orphan(orphan))
        statuses = await asyncio.gather(*map(_status, sources), return_exceptions=True)
        found = [(source, one) for source, one in zip(sources, statuses, strict=True) if isinstance(one, PoolStatus)]
        failures = [one for one in statuses if isinstance(one, BaseException)]
        if not found and not (as_json and orphans):
            _raise_all(failures)
        if as_json:
            shown = [_as_json(source, status) for source, status in found]
            unsupervised = [orphan.as_mapping() for orphan in orphans]
            say(out, json.dumps({"sources": shown, "orphans": unsupervised}, indent=2))
        else:
            for source, status in found:
                _show(source, status, out)
        _raise_all(failures)
    return OK


async def sleep(
    path: Path, names: Sequence[str], out: Console, errors: Console, *, level: int, drain: str, within_s: float
) -> int:
    """Let the servers free their devices. Raises as `show_status` does, and `ReplicasNotChanged`."""

    async def change(source: PoolSource) -> str:
        await source.sleep(level=level, drain=drain, within_s=within_s)
        return f"the servers sleep; wake them with: qreward pool wake {path}"

    async with _found(path, names) as sources:
        with _changing(path, errors, "the servers end their calls and go to sleep ..."):
            await _change_all(sources, change, out)
    return OK


async def wake(path: Path, names: Sequence[str], out: Console, errors: Console) -> int:
    """Let the servers take calls again. Raises as `sleep` does."""

    async def change(source: PoolSource) -> str:
        await source.wake_up()
        return "the servers are awake"

    async with _found(path, names) as sources:
        with _changing(path, errors, "the servers wake up ..."):
            await _change_all(sources, change, out)
    return OK


async def update(path: Path, name: str | None, weights: Path, out: Console, errors: Console, **how: Any) -> int:
    """Give the servers of one source other weights. `how`: see `RewardEngine.update_weights`. Raises as `sleep` does,
    and `InputError` if several sources could be meant.
    """
    named = f"{weights} as {how['version']}" if how["version"] else f"{weights}"

    async def change(source: PoolSource) -> str:
        await source.update_weights(weights, **how)
        if source.asleep:
            return f"the servers sleep; they load the weights of {named} when they wake up"
        return f"the servers have the weights of {named}"

    async with _found(path, () if name is None else (name,), only_one=True) as sources:
        with _changing(path, errors, "the servers get other weights ..."):
            await _change_all(sources, change, out)
    return OK


@asynccontextmanager
async def _found(path: Path, names: Sequence[str], *, only_one: bool = False) -> AsyncIterator[list[PoolSource]]:
    """Find the servers of all sources, before those of one are changed."""
    async with _opened(path, names) as (_, sources):
        if only_one and len(sources) > 1:
            known = ", ".join(source.name for source in sources)
            raise InputError(f"{path}: several sources have servers; name one of them by --source: {known}")
        await asyncio.gather(*(source.find() for source in sources))
        yield sources


@asynccontextmanager
async def _opened(path: Path, names: Sequence[str]) -> AsyncIterator[tuple[Config, list[PoolSource]]]:
    config = _loaded(path)
    sources: list[PoolSource] = opened_servers(config, path, names, finds=True)
    try:
        yield config, sources
    finally:
        await asyncio.gather(*(source.aclose() for source in sources))


class _SetVariables(Mapping[str, str]):
    """The variables of this process. One that is not set has a value, too, which is compared with nothing."""

    def __getitem__(self, name: str) -> str:
        return os.environ.get(name, _NOT_SET)

    def __iter__(self) -> Iterator[str]:
        return iter(os.environ)

    def __len__(self) -> int:
        return len(os.environ)


def _loaded(path: Path) -> Config:
    """Load a configuration, also if this shell lacks variables of the training. Raises `ConfigurationError`."""
    try:
        return load_config(path)
    except ConfigurationError as error:
        failure = error
    with suppress(ConfigurationError), environment_of(_SetVariables()):
        config = load_config(path)
        if _NOT_SET not in (config.engine.shared_directory or ""):
            return config
    raise failure


async def _status(source: PoolSource) -> PoolStatus:
    await source.find()
    return await source.status()


@contextmanager
def _changing(path: Path, errors: Console, what: str) -> Iterator[None]:
    """Show `what` is under way. Raises `InputError` for a value that no change takes."""
    try:
        with errors.status(what):
            yield
    except ValueError as error:
        raise InputError(str(error)) from None
    except asyncio.CancelledError:
        say(errors, f"interrupted; a change that has begun goes on: qreward pool status {path}")
        raise


async def _change_all(
    sources: Sequence[PoolSource], change: Callable[[PoolSource], Awaitable[str]], out: Console
) -> None:
    """Change the servers of all sources at once, and print what became of each that succeeded. Then raise."""
    results = await asyncio.gather(*map(change, sources), return_exceptions=True)
    for source, result in zip(sources, results, strict=True):
        if isinstance(result, str):
            say(out, f"{source.name}: {result}")
    _raise_all([result for result in results if isinstance(result, BaseException)])


def _raise_all(failures: Sequence[BaseException]) -> None:
    """Raise what happened, if anything: several errors of this package as one."""
    if len(failures) > 1 and all(isinstance(one, QRewardError) for one in failures):
        raise QRewardError("\n".join(str(one) for one in failures))
    for failure in failures:
        raise failure


def _said_of_orphan(orphan: Orphan) -> str:
    pids = " ".join(map(str, orphan.pids))
    what = f"{one_line(orphan.source, 200)}: a server of replica {orphan.replica} is unsupervised"
    devices = "" if orphan.devices == "cpu" else f" and holds the devices {one_line(orphan.devices, 200)}"
    return f"{what}{devices}; the next start of servers ends it, or: kill -9 {pids}"


def _show(source: PoolSource, status: PoolStatus, out: Console) -> None:
    weights = status.weights
    version = (
        f", weights {weights.version or 'updated'} ({one_line(weights.path, 1000) or 'from memory'})"
        if weights.revision
        else ""
    )
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
