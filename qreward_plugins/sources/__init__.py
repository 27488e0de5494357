"""What answers requests: language models and scoring services over HTTP, and local functions.

The names load on first use, because a worker process of a function imports this package too and needs no HTTP client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .base import Reply, Request, Source

if TYPE_CHECKING:
    from ..config import models
    from .function import FunctionSource
    from .openai import OpenAISource
    from .service import HTTPSource

__all__ = ["FunctionSource", "HTTPSource", "OpenAISource", "Reply", "Request", "Source", "open_source"]

_HOMES = {"FunctionSource": "function", "HTTPSource": "service", "OpenAISource": "openai"}


def open_source(name: str, config: models.Source) -> Source:
    """Make the source `name` of the configuration. It connects, and starts workers, with its first request.

    Raises ConfigurationError for what only the environment shows: an unset key, a function that cannot be loaded.
    """
    from .function import FunctionSource
    from .openai import OpenAISource
    from .service import HTTPSource

    if config.kind == "openai":
        return OpenAISource(name, config)
    if config.kind == "http":
        return HTTPSource(name, config)
    return FunctionSource(name, config)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
