"""What a configuration may ask of a training framework: the addresses of its servers (`base_url: framework://reward`),
and its reward phases (`colocated: true`).

The core knows no framework. An adapter calls `with_framework` with the addresses that it has found, before it opens the
engine. Outside of a framework such a URL is a mistake, which is reported when the source is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..errors import ConfigurationError, Mistake
from .load import adapted
from .models import Config
from .source_models import FRAMEWORK_SCHEME, EndpointConfig

OUTSIDE = (
    "a framework:// URL works only inside a training framework, whose adapter knows the address.",
    "Write the URL of the server.",
)
"""Problem and remedy of a URL that no adapter has filled in."""


def with_framework(
    config: Config, addresses: Mapping[str, str], *, framework: str, remedy: str = "Write the URL of the server."
) -> Config:
    """Return `config` with each `framework://NAME` replaced by the address of that server. A path after the name
    is kept (`framework://reward/v1`).

    `addresses` are the URLs of the framework's servers by name, without a slash at the end. `framework` is its name for
    messages, and `remedy` says how its user gets a server that is missing. Raises `ConfigurationError` for a name that
    is not in `addresses`.
    """
    return adapted(config, partial(_filled, addresses=dict(addresses), framework=framework, remedy=remedy))


def _filled(config: Config, *, addresses: Mapping[str, str], framework: str, remedy: str) -> Config:
    mistakes: list[Mistake] = []
    sources: dict[str, Any] = {}
    for name, source in config.sources.items():
        if not isinstance(source, EndpointConfig) or not any(map(is_framework_url, source.urls)):
            continue
        found = []
        for url in source.urls:
            server, slash, path = url.removeprefix(FRAMEWORK_SCHEME).partition("/")
            if not is_framework_url(url):
                found.append(url)
            elif server in addresses:
                found.append(addresses[server].rstrip("/") + slash + path)
            else:
                known = ", ".join(f"{FRAMEWORK_SCHEME}{other}" for other in sorted(addresses)) or "none"
                problem = f"{framework} has no server {server!r} (it has {known})."
                mistakes.append(Mistake(f"sources.{name}.{source.URL_KEY}", problem, remedy))
        sources[name] = source.model_copy(update={source.URL_KEY: tuple(found)})
    if mistakes:
        raise ConfigurationError(mistakes)
    return config.model_copy(update={"sources": {**config.sources, **sources}}) if sources else config


def without_colocated(config: Config, why: str, *, remedy: str) -> Config:
    """Return `config` unchanged. Now, and when it is read again, refuse a source with `colocated: true`, because the
    caller does not know when its trainer asks for rewards and when it trains.

    `why` is the reason, as a sentence. Raises `ConfigurationError`.
    """
    return adapted(config, partial(_uncolocated, why=why, remedy=remedy))


def colocated_sources(config: Config) -> tuple[str, ...]:
    """Return the names of the sources whose servers use the trainer's devices."""
    return tuple(name for name, source in config.sources.items() if getattr(source, "colocated", False))


def _uncolocated(config: Config, *, why: str, remedy: str) -> Config:
    found = colocated_sources(config)
    if found:
        raise ConfigurationError([Mistake(f"sources.{name}.colocated", why, remedy) for name in found])
    return config


def is_framework_url(url: str) -> bool:
    """Whether a URL names a server of the framework."""
    return url.startswith(FRAMEWORK_SCHEME)


__all__ = ["colocated_sources", "is_framework_url", "with_framework", "without_colocated"]
