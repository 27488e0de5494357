"""Defines `Provider`: what a provider counts requests by (address, model, key, headers), under any source name."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import unquote, urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, repr=False)
class Provider:
    """The identity of one source at its provider. It may hold a key, so it has no repr."""

    kind: str
    addresses: tuple[str, ...]
    """The URLs in canonical form (`address`)."""
    model: str = ""
    settings: tuple[str, ...] = ()
    """Further settings that may distinguish two accounts, such as headers; without the header of the key."""
    credentials: str | None = ""
    """The key as it is sent; "" if none is sent, None if it is unknown in this process."""

    @property
    def parts(self) -> tuple[str, ...]:
        """All fields as texts, for hashing."""
        return (self.kind, joined(self.addresses), self.model, self.credentials or "", joined(self.settings))

    def overlaps(self, other: Provider) -> bool:
        """Whether the provider may count the requests of both sources together. An unknown key matches every key."""
        unknown = self.credentials is None or other.credentials is None
        return (
            (self.kind, self.model, self.settings) == (other.kind, other.model, other.settings)
            and not set(self.addresses).isdisjoint(other.addresses)
            and (unknown or self.credentials == other.credentials)
        )


def address(url: str) -> str:
    """Return a URL in canonical form: lower-case host, explicit port, no trailing slash, no percent-encoding."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:  # opening the source reports the invalid URL
        return url
    host = (parts.hostname or "").removesuffix(".")
    with suppress(ValueError):
        host = ip_address(host).compressed
    return f"{parts.scheme}://[{host}]:{port}{unquote(parts.path).rstrip('/')}"


def joined(parts: tuple[str, ...]) -> str:
    """Join parts to one text. Each has its length before it, so that different parts never give the same text."""
    return "".join(f"{len(part)}:{part}" for part in parts)
