"""What a provider counts requests by, whoever calls a source by which name: address, model, key and headers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import unquote, urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, repr=False)
class Provider:
    """What one source is to its provider. It may hold a key, so it has no repr."""

    kind: str
    addresses: tuple[str, ...]
    """Where it is asked, each address in one spelling."""
    model: str = ""
    settings: tuple[str, ...] = ()
    """What else tells two accounts apart, such as headers; without the header of the key."""
    credentials: str | None = ""
    """The key as it is sent; "" if none is sent, None if it is not known in this process."""

    @property
    def parts(self) -> tuple[str, ...]:
        """All of it as texts that may be hashed."""
        return (self.kind, joined(self.addresses), self.model, self.credentials or "", joined(self.settings))

    def overlaps(self, other: Provider) -> bool:
        """Whether the provider may count requests of both sources together. An unknown key may be any key."""
        unknown = self.credentials is None or other.credentials is None
        return (
            (self.kind, self.model, self.settings) == (other.kind, other.model, other.settings)
            and not set(self.addresses).isdisjoint(other.addresses)
            and (unknown or self.credentials == other.credentials)
        )


def address(url: str) -> str:
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


def joined(parts: tuple[str, ...]) -> str:
    """Parts as one text; with their lengths, so that no two of them run into each other."""
    return "".join(f"{len(part)}:{part}" for part in parts)
