"""Opens a source: makes an instance of its kind from its part of the configuration."""

from __future__ import annotations

from collections.abc import Mapping

from ..config.source_models import SourceConfig
from ..errors import ConfigurationError, Mistake
from ..redaction import described_error
from ..registry import kind_or_mistake, sources
from .base import Source
from .kind import SourceKind
from .provider import Provider


def kind_of(config: SourceConfig) -> type[SourceKind]:
    """Return the kind of source that `config` is for. Raises ConfigurationError if it cannot be loaded."""
    return kind_or_mistake(sources, config.kind)


def open_source(name: str, config: SourceConfig) -> Source:
    """Make the source `name` of the configuration. Its first request connects, or starts workers.

    Raises ConfigurationError for mistakes that depend on the environment: an unset key, a function that cannot be
    loaded, a kind of another package whose constructor raises.
    """
    kind = kind_of(config)
    try:
        source = kind(name, config)
        if source.name == name:
            return source
        said = f"its name is {source.name!r}; its `__init__` must call `super().__init__(name, config)`"
    except ConfigurationError:
        raise
    except Exception as error:
        said = described_error(error)
    # Raised outside the `except`, so that it has no `__context__`: the text of the foreign error may hold secrets.
    raise ConfigurationError([Mistake(f"sources.{name}", f"{_origin(config)} cannot open the source: {said}.")])


def provider_of(name: str, config: SourceConfig, environment: Mapping[str, str]) -> Provider:
    """Return what the provider of the source `name` counts requests by.

    Raises ConfigurationError if `SourceKind.provider` raises.
    """
    kind = kind_of(config)
    try:
        return kind.provider(config, environment)
    except Exception as error:
        said = described_error(error)
    raise ConfigurationError([Mistake(f"sources.{name}", f"{_origin(config)} cannot identify its provider: {said}.")])


def _origin(config: SourceConfig) -> str:
    return sources.registrations(config.kind)[0].origin
