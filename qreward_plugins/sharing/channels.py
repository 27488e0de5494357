"""Opens the channel from this process to the keeper of shared limits."""

from __future__ import annotations

from typing import Literal

from ..errors import ConfigurationError, Mistake
from ..named_actors import ray_is_up, start_ahead
from .membership import Channel


def open_channel(shared: Literal["auto", "ray", "local", "off"]) -> Channel | None:
    """Open the channel that `engine.shared` selects, and start the keeper in the background; None if limits are not
    shared: for `local` and `off`, and for `auto` if Ray is not initialised.

    Raises `ConfigurationError` for `ray` if Ray is not initialised.
    """
    if shared == "ray" and not ray_is_up():
        problem = "needs Ray, which is not initialised in this process."
        remedy = "Call ray.init() before you create the engine, or set it to `auto` or `local`."
        raise ConfigurationError([Mistake("engine.shared", problem, remedy)])
    if shared in ("local", "off") or not ray_is_up():
        return None
    from .ray_keeper import NAME, KeeperActor, RayKeeper

    start_ahead(NAME, KeeperActor)
    return RayKeeper()
