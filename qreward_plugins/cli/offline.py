"""Prepares a configuration for a check without servers, keys or a training framework: `qreward check --offline`."""

from __future__ import annotations

import os
from typing import Any

from pydantic import SecretStr

from ..config import Config, EndpointConfig
from ..config.framework import is_framework_url
from ..sources.replica_pools import pool_spec
from ..sources.replica_set_config import ReplicaSetConfig

_NOWHERE = "http://127.0.0.1:9"


def without_servers(config: Config) -> tuple[Config, list[str]]:
    """Return a configuration that can be opened without servers, and one line for each thing that is missing here and
    that a run needs. Send nothing to its sources.

    Placeholders replace keys that are not set, addresses from a framework, dialects that a server would state, and Ray.
    Raises `ConfigurationError` for servers that could not be placed on any cluster.
    """
    notes: list[str] = []
    sources: dict[str, Any] = {}
    for name, source in config.sources.items():
        if not isinstance(source, EndpointConfig):
            continue
        changes: dict[str, Any] = {}
        if isinstance(source.api_key_env, str) and not os.environ.get(source.api_key_env, "").strip():
            changes |= {"api_key_env": None, "api_key": SecretStr("none")}
            notes.append(
                f"{name}: {source.api_key_env} is not set; set it where you train: export {source.api_key_env}=..."
            )
        if any(map(is_framework_url, source.urls)):
            changes[source.URL_KEY] = tuple(_NOWHERE if is_framework_url(url) else url for url in source.urls)
            notes.append(f"{name}: its address comes from the training framework")
        if isinstance(source, ReplicaSetConfig) and source.placement == "ray":
            pool_spec(name, source)  # what Ray could not place is a mistake with any cluster
            changes |= {"placement": "local", "platform": "cpu", "devices": None}
            notes.append(f"{name}: its servers run on a Ray cluster, which was not joined")
        if getattr(source, "dialect", None) == "auto":
            changes["dialect"] = "openai"
            notes.append(f"{name}: its dialect was not asked for")
        sources[name] = source.model_copy(update=changes)
    # A check must not create, open or fill the journal of a run, and shares no limits with one.
    alone = config.engine.model_copy(update={"journal": None, "shared": "off"})
    return config.model_copy(update={"sources": {**config.sources, **sources}, "engine": alone}), notes
