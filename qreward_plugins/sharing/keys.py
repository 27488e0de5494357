"""Keys that identify a source across processes and configurations.

A provider counts requests by address, model, API key and headers. Two configurations of a job may spell the same
endpoint differently; the limit is still one. A configuration that declares the same endpoint twice declares two
sources, each with its own limits.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping

from ..config import Config
from ..sources.opening import provider_of
from ..sources.provider import Provider, joined


def source_keys(config: Config) -> dict[str, str]:
    """Return a key of 24 hexadecimal digits for each source name of `config`.

    Keys are equal in all processes whose requests the provider counts together. They are hashes and reveal no secret.
    """
    providers = _providers(config, None)
    often = Counter(providers.values())
    return {
        name: _digest(provider.parts if often[provider] == 1 else (*provider.parts, name))
        for name, provider in providers.items()
    }


def source_addresses(config: Config) -> dict[str, frozenset[str]]:
    """Return the addresses of each source of `config`. Those of a foreign kind may
    hold secrets: do not show them."""
    return {
        name: frozenset(f"{provider.kind} {place}" for place in provider.addresses)
        for name, provider in _providers(config, None).items()
    }


def may_share(
    mine: Config,
    other: Config,
    *,
    environment: Mapping[str, str] | None = None,
    their_environment: Mapping[str, str] | None = None,
) -> bool:
    """Return whether a provider may count requests of both configurations together.

    True if a source of `mine` and a source of `other` share an address and have the same model, headers and API key. A
    key whose environment variable is not set matches any key. `environment` and `their_environment` are the variables
    of the processes that use `mine` and `other`; the default is this process's environment.
    """
    ours, theirs = _providers(mine, environment), _providers(other, their_environment)
    return any(one.overlaps(another) for one in ours.values() for another in theirs.values())


def _providers(config: Config, environment: Mapping[str, str] | None) -> dict[str, Provider]:
    variables = os.environ if environment is None else environment
    return {name: provider_of(name, node, variables) for name, node in config.sources.items()}


def _digest(parts: tuple[str, ...]) -> str:
    return hashlib.blake2b(joined(parts).encode(), digest_size=12, person=b"qreward source").hexdigest()
