"""Opening a source: from its part of the configuration to an instance of its kind."""

from __future__ import annotations

from collections.abc import Mapping

from ..config.source_models import SourceConfig
from ..errors import ConfigurationError, Mistake
from ..registry import described_error, kind_or_mistake, sources
from .base import Source
from .kind import SourceKind
from .provider import Provider


def kind_of(config: SourceConfig) -> type[SourceKind]:
    """The kind of source that `config` is for. Raises ConfigurationError if it cannot be had."""
    return kind_or_mistake(sources, config.kind)


def open_source(name: str, config: SourceConfig) -> Source:
    """Make the source `name` of the configuration. It connects, and starts workers, with its first request.

    Raises ConfigurationError for what only the environment shows: an unset key, a function that cannot be loaded, a
    kind of another package that does not open.
    """
    kind = kind_of(config)
    try:
        source = kind(name, config)
        if source.name == name:
            return source
        said = f"it calls itself {source.name!r}; let `__init__` call `super().__init__(name, config)`"
    except ConfigurationError:
        raise
    except Exception as error:
        said = described_error(error)
    # Raised outside the `except`, so that it does not carry the foreign error, whose text may hold secrets.
    raise ConfigurationError([Mistake(f"sources.{name}", f"{_origin(config)} cannot open the source: {said}.")])


def provider_of(name: str, config: SourceConfig, environment: Mapping[str, str]) -> Provider:
    """What the provider of the source `name` counts requests by. Raises ConfigurationError if its kind cannot tell."""
    kind = kind_of(config)
    try:
        return kind.provider(config, environment)
    except Exception as error:
        said = described_error(error)
    raise ConfigurationError([Mistake(f"sources.{name}", f"{_origin(config)} cannot tell its provider: {said}.")])


def _origin(config: SourceConfig) -> str:
    return sources.registrations(config.kind)[0].origin
