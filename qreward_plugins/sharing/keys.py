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

from ..config import Config, SourceConfig
from ..sources import Provider, kind_of
from ..sources.provider import joined


def source_keys(config: Config) -> dict[str, str]:
    """A key for every source of `config`, by name: 24 hexadecimal digits, equal in all processes for which the
    provider counts together. Nothing can be read back out of them.
    """
    providers = {name: _provider(node, os.environ) for name, node in config.sources.items()}
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
    ours = [_provider(node, os.environ if environment is None else environment) for node in mine.sources.values()]
    theirs = [
        _provider(node, os.environ if their_environment is None else their_environment)
        for node in other.sources.values()
    ]
    return any(one.overlaps(another) for one in ours for another in theirs)


def _provider(node: SourceConfig, environment: Mapping[str, str]) -> Provider:
    return kind_of(node).provider(node, environment)


def _digest(parts: tuple[str, ...]) -> str:
    return hashlib.blake2b(joined(parts).encode(), digest_size=12, person=b"qreward source").hexdigest()
