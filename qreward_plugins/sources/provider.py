"""Defines `Provider`: the address, model, key and headers by which a provider counts requests, for any source name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
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


def provider_of(config: Any, environment: Mapping[str, str], key_header: tuple[str, str]) -> Provider:
    """Return the `Provider` of an HTTP source.

    `key_header` is the name of the header that carries the key, and the text before the key in its value.
    """
    headers = {name.lower(): value.get_secret_value().strip() for name, value in sorted(config.headers.items())}
    key: str | None = ""
    if config.api_key is not None:
        key = config.api_key.get_secret_value().strip()
    elif isinstance(config.api_key_env, str):
        key = environment.get(config.api_key_env, "").strip() or None
    carrier, before = key_header
    credentials: str | None = headers.pop(carrier.lower(), "")
    if config.httpx is not None and config.httpx.auth is not None:
        key, before = config.httpx.auth, "auth "
    if key != "":
        credentials = None if key is None else f"{before}{key}"
    return Provider(
        config.kind,
        tuple(sorted(set(map(address, config.urls)))),
        getattr(config, "model", None) or "",
        tuple(f"{name}: {value}" for name, value in sorted(headers.items())),
        credentials,
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
