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
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..config import Config
from ..config.models import FunctionSource, OpenAISource, Source

_DEFAULT_PORTS = {"http": 80, "https": 443}


def source_keys(config: Config) -> dict[str, str]:
    """A key for every source of `config`, by name: 24 hexadecimal digits, equal in all processes for which the
    provider counts together. Nothing can be read back out of them.
    """
    identities = {name: _identity(node, os.environ) for name, node in config.sources.items()}
    often = Counter(identities.values())
    return {
        name: _digest(identity.parts if often[identity] == 1 else (*identity.parts, name))
        for name, identity in identities.items()
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
    ours = [_identity(node, os.environ if environment is None else environment) for node in mine.sources.values()]
    theirs = [
        _identity(node, os.environ if their_environment is None else their_environment)
        for node in other.sources.values()
    ]
    return any(one.overlaps(another) for one in ours for another in theirs)


@dataclass(frozen=True, repr=False)
class _Identity:
    """What a provider sees of a source. It holds the key, so it has no repr and leaves this module only as a digest."""

    kind: str
    addresses: tuple[str, ...]
    model: str
    headers: tuple[str, ...]
    """As they are sent, without the header of the key."""
    authorization: str | None
    """The header that carries the key; "" if none is sent, None if the key is not known in this process."""

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.kind, _joined(self.addresses), self.model, self.authorization or "", _joined(self.headers))

    def overlaps(self, other: _Identity) -> bool:
        """Whether the provider may count requests of both sources together."""
        unknown = self.authorization is None or other.authorization is None
        return (
            (self.kind, self.model, self.headers) == (other.kind, other.model, other.headers)
            and not set(self.addresses).isdisjoint(other.addresses)
            and (unknown or self.authorization == other.authorization)
        )


def _identity(node: Source, environment: Mapping[str, str]) -> _Identity:
    if isinstance(node, FunctionSource):
        return _Identity(node.kind, (_function(node.function),), "", (), "")
    headers = {name.lower(): value.get_secret_value().strip() for name, value in sorted(node.headers.items())}
    key: str | None = ""
    if node.api_key is not None:
        key = node.api_key.get_secret_value().strip()
    elif node.api_key_env is not None:
        key = environment.get(node.api_key_env, "").strip() or None
    authorization = headers.pop("authorization", "")
    if key != "":
        # As sources/endpoint.py sends it.
        authorization = f"Bearer {key}"
    urls = node.base_url if isinstance(node, OpenAISource) else node.url
    return _Identity(
        node.kind,
        tuple(sorted(set(map(_address, urls)))),
        node.model or "",
        tuple(f"{name}: {value}" for name, value in sorted(headers.items())),
        None if key is None else authorization,
    )


def _address(url: str) -> str:
    """A URL in one spelling: host in lower case, no default port, no slash at the end, nothing quoted."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:  # opening the source says what is wrong with it
        return url
    host = (parts.hostname or "").removesuffix(".")
    with suppress(ValueError):
        host = ip_address(host).compressed
    return f"{parts.scheme}://[{host}]:{port}{unquote(parts.path).rstrip('/')}"


def _function(path: str) -> str:
    """A function in one spelling: a file by its whole path."""
    where, _, name = path.rpartition(":")
    return f"{Path(where).resolve() if where.endswith('.py') else where}:{name}"


def _digest(identity: tuple[str, ...]) -> str:
    return hashlib.blake2b(_joined(identity).encode(), digest_size=12, person=b"qreward source").hexdigest()


def _joined(parts: tuple[str, ...]) -> str:
    """Parts as one text; with their lengths, so that no two of them run into each other."""
    return "".join(f"{len(part)}:{part}" for part in parts)
