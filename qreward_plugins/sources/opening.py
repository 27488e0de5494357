"""Opening a source: from its part of the configuration to an instance of its kind."""

from __future__ import annotations

from ..config.source_models import SourceConfig
from ..errors import ConfigurationError, Mistake
from ..redaction import one_line
from ..registry import KindError, sources
from .base import Source
from .kind import SourceKind

_MESSAGE_CHARS = 200


def kind_of(config: SourceConfig) -> type[SourceKind]:
    """The kind of source that `config` is for. Raises ConfigurationError if it cannot be had."""
    try:
        return sources.load(config.kind)
    except KindError as error:
        mistake = Mistake("sources", f"{error.problem} (kind {config.kind!r}).", error.remedy)
    raise ConfigurationError([mistake])


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
        said = one_line(f"{type(error).__name__}: {error}", _MESSAGE_CHARS)
    # Raised outside the `except`, so that it does not carry the foreign error, whose text may hold secrets.
    origins = sources.registrations(config.kind)
    problem = f"the source cannot be opened by {origins[0].origin}: {said}."
    raise ConfigurationError([Mistake(f"sources.{name}", problem)])
