"""Which way leads to a keeper of shared limits, in this process."""

from __future__ import annotations

from typing import Literal

from ..errors import ConfigurationError, Mistake
from ..named_actors import ray_is_up, start_ahead
from .membership import Channel


def open_channel(shared: Literal["auto", "ray", "local", "off"]) -> Channel | None:
    """The way to the keeper that `engine.shared` asks for, which is being started then; None: there is none.

    Raises `ConfigurationError` where Ray is asked for and not initialised.
    """
    if shared == "ray" and not ray_is_up():
        problem = "asks for Ray, which is not initialised in this process."
        remedy = "Call ray.init() before the engine is made, or choose `auto` or `local`."
        raise ConfigurationError([Mistake("engine.shared", problem, remedy)])
    if shared in ("local", "off") or not ray_is_up():
        return None
    from .ray_keeper import NAME, KeeperActor, RayKeeper

    start_ahead(NAME, KeeperActor)
    return RayKeeper()
