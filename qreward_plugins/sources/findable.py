"""Makes the configuration of a source whose servers run already, in a process that lacks their environment.

`qreward pool` looks for servers from a shell. The training has its own `CUDA_VISIBLE_DEVICES`, and its own keys.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from ..errors import ConfigurationError
from .replica_pools import pool_spec
from .replica_set_config import ReplicaSetConfig

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "weight_updates": ("in_place",),
    "placement": ("assigned",),
    "api_keys": ("api_key",),
}
"""The fields of a spec for keys of the configuration that have another name."""
_FROM_ENVIRONMENT = "oc.env:"


def findable(name: str, config: ReplicaSetConfig, written: Any) -> tuple[ReplicaSetConfig, frozenset[str]]:
    """Return the configuration with what it leaves to the environment filled in, so that a source can be made of it,
    and the names of these fields of its spec (`chosen`). `written` are the plain values of the source in the file.

    Raises ConfigurationError for mistakes of the configuration itself.
    """
    unwritten = {field for key in _from_environment(written) for field in _fields(key)}
    changes: dict[str, Any] = {}
    if config.platform == "auto":
        unwritten.add("platform")
    if config.api_key_env is not None:
        unwritten.add("api_key")
        if not (isinstance(config.api_key_env, str) and os.environ.get(config.api_key_env, "").strip()):
            changes |= {"api_key_env": None, "api_key": SecretStr("none")}
    if config.log_folder is not None and not os.path.isabs(config.log_folder):
        unwritten.add("log_folder")
    if config.devices is None:
        unwritten.add("devices")
    if "devices" in unwritten and config.placement == "local":
        try:
            pool_spec(name, config)
        except ConfigurationError as error:
            if any(mistake.path != f"sources.{name}.devices" for mistake in error.mistakes):
                raise
            # This shell sees other devices.
            changes["devices"] = tuple(range(config.data_parallel * config.tensor_parallel))
    return config.model_copy(update=changes), frozenset(unwritten)


def _from_environment(written: Any) -> set[str]:
    """Return the keys whose values come from the environment; "arguments.seed" for one below `arguments`."""
    found: set[str] = set()
    for key, value in written.items() if isinstance(written, Mapping) else ():
        if isinstance(value, Mapping) and key in ("arguments", "environment"):
            found |= {f"{key}.{below}" for below, item in value.items() if _FROM_ENVIRONMENT in str(item)}
        elif _FROM_ENVIRONMENT in str(value):
            found.add(str(key))
    return found


def _fields(key: str) -> tuple[str, ...]:
    return _FIELDS.get(key, (key,))
