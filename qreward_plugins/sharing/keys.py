"""What makes a source one and the same to its provider, whoever calls it by which name.

The provider counts by address, model, key and headers. Two domains of a job may each have a configuration that names
the same endpoint, spelt in another way; the limit is one. A configuration that names the same endpoint twice means two
things by it, each with its own limits.
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
    """A key for every source of `config`, by name: 24 hexadecimal digits, equal in all processes for which the
    provider counts together. Nothing can be read back out of them.
    """
    providers = _providers(config, None)
    often = Counter(providers.values())
    return {
        name: _digest(provider.parts if often[provider] == 1 else (*provider.parts, name))
        for name, provider in providers.items()
    }


def may_share(
    mine: Config,
    other: Config,
    *,
    environment: Mapping[str, str] | None = None,
    their_environment: Mapping[str, str] | None = None,
) -> bool:
    """Whether a provider may count requests of both configurations together.

    True if a source of one and a source of the other share an address, and have the same model, headers and key. A key
    whose variable is not set may be any key. `environment` and `their_environment`: the variables of the processes that
    use `mine` and `other`; default: those of this process.
    """
    ours, theirs = _providers(mine, environment), _providers(other, their_environment)
    return any(one.overlaps(another) for one in ours.values() for another in theirs.values())


def _providers(config: Config, environment: Mapping[str, str] | None) -> dict[str, Provider]:
    variables = os.environ if environment is None else environment
    return {name: provider_of(name, node, variables) for name, node in config.sources.items()}


def _digest(parts: tuple[str, ...]) -> str:
    return hashlib.blake2b(joined(parts).encode(), digest_size=12, person=b"qreward source").hexdigest()
