"""Which keeper a configuration asks, and by which keys processes know a source.

A provider counts requests by address, model, API key and headers. Two configurations of a job may spell the same
endpoint differently; the limit is still one. A configuration that declares the same endpoint twice declares two
sources, each with its own limits.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections import Counter
from collections.abc import Iterable
from typing import Literal, Protocol, TypeAlias

from ..config import Config
from ..errors import ConfigurationError, Mistake
from ..sources.kind import Provider, joined, kind_of, provider_of
from ..system.ray_actors import missing_ray, ray_is_up, start_ahead
from .membership import Channel
from .ray_keeper import NAME, KeeperActor, RayKeeper

Sharing: TypeAlias = Literal["auto", "ray", "machine", "local", "off"]
"""How limits are shared (`engine.shared`)."""


class OpenedChannel(Channel, Protocol):
    """A channel of this package."""

    kept_by: str
    """Who keeps the limits; empty if that is not known yet."""

    async def aclose(self) -> None:
        """Close what is open. Idempotent."""
        ...


def channel_of(config: Config, *, processes: int = 1, starts: bool = True) -> OpenedChannel | None:
    """Open the channel that `engine.shared` selects, see `open_channel`.

    With `auto`, a machine's keeper is for declared rates, and not for `processes` above 1: whoever counts the processes
    that share the limits may have them on several machines, and each keeps to an equal part. A job of Ray that only
    calls functions without limits needs no keeper: its actor would cost a process of 100 MB and a second of start.
    """
    rates, limits = has_rates(config) and processes == 1, has_limits(config)
    return open_channel(config.engine.shared, has_rates=rates, has_limits=limits, starts=starts)


def has_rates(config: Config) -> bool:
    """Return whether there are requests or tokens per minute, or a budget, that processes have to share."""
    limits = [source.limits for source in config.sources.values()]
    budgets = [config.engine.budget, *(source.budget for source in config.sources.values())]
    return any(each.requests_per_minute or each.tokens_per_minute for each in limits) or any(budgets)


def has_limits(config: Config) -> bool:
    """Return whether a source has limits that processes share, or may turn out to have some: each one but functions
    without declared limits.
    """
    sources = config.sources.values()
    return has_rates(config) or any(each.limits.concurrency or not kind_of(each).local for each in sources)


def open_channel(
    shared: Sharing, *, has_rates: bool = True, has_limits: bool = True, starts: bool = True
) -> OpenedChannel | None:
    """Open the channel to a keeper; None if limits are not shared: for `local` and `off`. `auto` is the keeper of the
    Ray job where Ray is initialised and there are limits, otherwise that of this machine if there are rates to keep,
    outside of simulated time. A keeper on Ray starts in the background, or without `starts` with the first report, as
    one of a machine does.

    Raises `ConfigurationError` for `ray` if Ray is not initialised, and for `machine` if the system has no Unix sockets
    or the directory cannot be used.
    """
    if shared == "ray" and not ray_is_up():
        remedy = "Call ray.init() before you create the engine, or set it to `auto`, `machine` or `local`."
        raise ConfigurationError([Mistake("engine.shared", missing_ray(), remedy)])
    if shared == "auto" and not has_limits:
        return None
    if shared in ("auto", "ray") and ray_is_up():
        if starts:
            start_ahead(NAME, KeeperActor)
        return RayKeeper()
    has_sockets = hasattr(socket, "AF_UNIX") and hasattr(os, "fork")
    if shared == "machine" and not has_sockets:
        problem = "needs Unix domain sockets, which this system does not have."
        raise ConfigurationError([Mistake("engine.shared", problem, "Use `local`.")])
    if shared == "machine" or (shared == "auto" and has_rates and has_sockets and not _in_simulated_time()):
        from .machine_channel import MachineChannel

        return MachineChannel()
    return None


def source_keys(config: Config) -> dict[str, str]:
    """Return a key of 24 hexadecimal digits for each source name of `config`.

    Keys are equal in all processes whose requests the provider counts together. They are hashes and reveal no secret.
    """
    providers = _providers(config)
    often = Counter(providers.values())
    return {
        name: _digest(provider.parts if often[provider] == 1 else (*provider.parts, name))
        for name, provider in providers.items()
    }


def budget_key(sources: Iterable[str], run: str) -> str:
    """Return the key of what the sources with these keys may spend together; with `run`, in this run."""
    return _digest(("budget", run, *sorted(sources)))


def _providers(config: Config) -> dict[str, Provider]:
    return {name: provider_of(name, node, os.environ) for name, node in config.sources.items()}


def _digest(parts: tuple[str, ...]) -> str:
    return hashlib.blake2b(joined(parts).encode(), digest_size=12, person=b"qreward source").hexdigest()


def _in_simulated_time() -> bool:
    return bool(getattr(asyncio._get_running_loop(), "is_simulated", False))
