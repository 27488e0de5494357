"""Opens a source: makes an instance of its kind from its part of the configuration."""

from __future__ import annotations

from collections.abc import Mapping

from ..config.registry import kind_or_mistake, sources
from ..config.several_keys import configured_name, with_written_path
from ..config.source_models import SourceConfig
from ..errors import ConfigurationError, Mistake
from ..secrets import described_error
from .base import Source
from .kind import Provider, SourceKind


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
        problem = f"its name is {source.name!r}; its `__init__` must call `super().__init__(name, config)`"
    except ConfigurationError as error:
        raise ConfigurationError(
            [with_written_path(mistake, name) for mistake in error.mistakes], origin=error.origin
        ) from None
    except Exception as error:
        problem = described_error(error)
    # Raised outside the `except`, so that it has no `__context__`: the text of the foreign error may hold secrets.
    raise ConfigurationError([Mistake(f"sources.{name}", f"{_origin(config)} cannot open the source: {problem}.")])


def provider_of(name: str, config: SourceConfig, environment: Mapping[str, str]) -> Provider:
    """Return what the provider of the source `name` counts requests by.

    Raises ConfigurationError if `SourceKind.provider` raises.
    """
    kind = kind_of(config)
    try:
        return kind.provider(config, environment)
    except Exception as error:
        problem = described_error(error)
    raise ConfigurationError(
        [Mistake(f"sources.{name}", f"{_origin(config)} cannot identify its provider: {problem}.")]
    )


def _origin(config: SourceConfig) -> str:
    return sources.registrations(config.kind)[0].origin


def same_keys(sources: Mapping[str, SourceConfig], environment: Mapping[str, str]) -> list[Mistake]:
    """Find keys of one source that are equal because two variables hold the same key: their limits would be counted
    twice.
    """
    mistakes: list[Mistake] = []
    first: dict[tuple[str, str], str] = {}
    for name, config in sources.items():
        whole = configured_name(name)
        if whole == name:
            continue
        key = provider_of(name, config, environment).credentials
        if not key:
            continue
        other = first.setdefault((whole, key), name)
        if other != name:
            problem = f"it holds the same key as number {other.removeprefix(whole)[1:]}."
            mistake = Mistake(f"sources.{name}.api_key_env", problem, "Each key is used once; its limits are its own.")
            mistakes.append(with_written_path(mistake, name))
    return mistakes
