"""Makes one source of each key of a source with several keys.

A provider counts by key, so each key needs its own quota, breaker and statistics. The scheduler has these for each
source. So a source with three keys becomes three sources that differ only in name and key, and nothing else needs to
know of keys. Verdicts and metrics give the name of the configuration (`configured_name`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from ..errors import Mistake
from .source_models import SourceConfig

if TYPE_CHECKING:
    from .models import Config

_NUMBERED = re.compile(r"(.+)#([1-9][0-9]*)", re.DOTALL)


def with_each_key(config: Config) -> Config:
    """Return `config` with a source `NAME#1`, `NAME#2` and so on in place of each source `NAME` with several keys."""
    if not any(map(_keys, config.sources.values())):
        return config
    sources: dict[str, SourceConfig] = {}
    for name, node in config.sources.items():
        keys = _keys(node)
        for number, key in enumerate(keys, 1):
            one = node.model_copy(update={"api_key_env": key})
            sources[name if len(keys) == 1 else f"{name}#{number}"] = one
        if not keys:
            sources[name] = node
    return config.model_copy(update={"sources": sources})


def _keys(node: SourceConfig) -> tuple[str, ...]:
    """Return the variables of several keys; empty for one key or none."""
    variables = getattr(node, "api_key_env", None)
    return variables if isinstance(variables, tuple) else ()


def without_keys(config: Config, names: Collection[str]) -> Config:
    """Return `config` with one source in place of all keys of each of `names`: its caller opened it in its own way."""
    if not any(name in names for name in map(configured_name, config.sources)):
        return config
    sources: dict[str, SourceConfig] = {}
    for name, node in config.sources.items():
        whole = configured_name(name)
        sources.setdefault(whole if whole in names else name, node)
    return config.model_copy(update={"sources": sources})


def configured_name(name: str) -> str:
    """Return the name in the configuration of the source `name`: without the number of its key."""
    if "#" not in name:
        return name
    found = _NUMBERED.fullmatch(name)
    return name if found is None else found[1]


def with_written_path(mistake: Mistake, name: str) -> Mistake:
    """Return a mistake in the source `name` with the path that its user wrote: `sources.a.api_key_env[1]` instead of
    `sources.a#2.api_key_env`.
    """
    found = _NUMBERED.fullmatch(name)
    if found is None or not mistake.path.startswith(f"sources.{name}"):
        return mistake
    rest = mistake.path.removeprefix(f"sources.{name}")
    if rest == ".api_key_env":
        rest += f"[{int(found[2]) - 1}]"
    return Mistake(f"sources.{found[1]}{rest}", mistake.problem, mistake.remedy)
