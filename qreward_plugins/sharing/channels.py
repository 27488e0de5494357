"""Opens the connection to a keeper that the configuration selects."""

from __future__ import annotations

import os
import socket
from typing import Protocol

from ..config import EngineConfig
from ..errors import ConfigurationError, Mistake
from ..system.private_directory import private_directory
from ..system.ray_actors import missing_ray, ray_is_up, start_ahead
from .membership import Channel
from .ray_keeper import NAME, KeeperActor, RayKeeper


class OpenedChannel(Channel, Protocol):
    """A channel of this package."""

    kept_by: str
    """Who keeps the limits; empty if that is not known yet."""

    async def describe(self) -> str:
        """Return who keeps the limits now, as a part of a sentence. Takes no share. Raises `KeeperSilent`."""
        ...

    async def aclose(self) -> None:
        """Close what is open. Idempotent."""
        ...


def open_channel(settings: EngineConfig, *, relays: bool = False) -> OpenedChannel | None:
    """Open the channel that `engine.shared` selects; None if limits are not shared: for `local` and `off`, and for
    `auto` if Ray is not initialised. A keeper on Ray starts in the background. `relays`: the channel carries reports of
    workers in other processes, which may outlive this one.

    Raises `ConfigurationError` for `ray` if Ray is not initialised, for `machine` if the system has no Unix sockets or
    the directory cannot be used, and for `server` if the token is missing.
    """
    shared = settings.shared
    if shared == "machine":
        if not hasattr(socket, "AF_UNIX") or not hasattr(os, "fork"):
            problem = "needs Unix domain sockets, which this system does not have."
            raise ConfigurationError([Mistake("engine.shared", problem, "Use `local`, or `server`.")])
        from .machine_channel import MachineChannel

        return MachineChannel(private_directory(settings.shared_directory), relays=relays)
    if shared == "server":
        from .server_channel import ServerChannel

        assert settings.shared_server is not None, "checked by its model"
        return ServerChannel.of(settings.shared_server)
    if shared == "ray" and not ray_is_up():
        remedy = "Call ray.init() before you create the engine, or set it to `auto`, `machine` or `local`."
        raise ConfigurationError([Mistake("engine.shared", missing_ray(), remedy)])
    if shared in ("local", "off") or not ray_is_up():
        return None
    start_ahead(NAME, KeeperActor)
    return RayKeeper()
