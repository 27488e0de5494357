"""Opening lanes: every source of a configuration with its quota, or every mistake that keeps them from being opened."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import Config
from ..errors import ConfigurationError, Mistake
from ..quotas import Quota, SharedQuota
from ..sources import Source, open_source
from .lane import Lane


def open_lanes(
    config: Config, opened: Mapping[str, Source], *, processes: int, shared: bool = False
) -> dict[str, Lane]:
    """The lanes of `config` by name. `opened` are sources that take the place of those that it would open; `processes`
    share the limits equally; with `shared` a keeper says how much of them is this one's.

    Raises `ConfigurationError` with every limit that cannot be shared, and whatever opening a source raises.
    """
    lanes: dict[str, Lane] = {}
    mistakes: list[Mistake] = []
    for name, node in config.sources.items():
        source = opened.get(name) or open_source(name, node)
        try:
            quota = (
                SharedQuota(node.limits, source=name, slots=source.slots)
                if shared
                else Quota(node.limits, source=name, processes=processes, slots=source.slots)
            )
        except ConfigurationError as error:
            mistakes.extend(error.mistakes)
            continue
        lanes[name] = Lane(source, quota, timeout_s=node.timeouts.total_s, price=node.price, weight=node.weight)
    if mistakes:
        raise ConfigurationError(mistakes)
    return lanes
