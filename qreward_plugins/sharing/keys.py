"""What makes a source one and the same to its provider, whoever calls it by which name.

Two domains of a job may each have a configuration that names the same endpoint, with the same key: the limit is one. A
configuration that names the same endpoint twice means two things by it, each with its own limits.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter

from ..config import Config
from ..config.models import FunctionSource, HTTPSource, OpenAISource, Source


def source_keys(config: Config) -> dict[str, str]:
    """A key for every source of `config`, by name: 24 hexadecimal digits, equal in all processes for which the
    provider counts together. Nothing can be read back out of them.
    """
    identities = {name: _identity(node) for name, node in config.sources.items()}
    often = Counter(identities.values())
    return {
        name: _digest(identity if often[identity] == 1 else (*identity, name)) for name, identity in identities.items()
    }


def _identity(node: Source) -> tuple[str, ...]:
    if isinstance(node, FunctionSource):
        return (node.kind, node.function)
    key = node.api_key.get_secret_value() if node.api_key is not None else os.environ.get(node.api_key_env or "", "")
    headers = [f"{name.lower()}: {value.get_secret_value()}" for name, value in sorted(node.headers.items())]
    return (node.kind, *_addresses(node), node.model or "", key.strip(), *headers)


def _addresses(node: OpenAISource | HTTPSource) -> tuple[str, ...]:
    return tuple(sorted(node.base_url if isinstance(node, OpenAISource) else node.url))


def _digest(identity: tuple[str, ...]) -> str:
    joined = "".join(f"{len(part)}:{part}" for part in identity)
    return hashlib.blake2b(joined.encode(), digest_size=12, person=b"qreward source").hexdigest()
