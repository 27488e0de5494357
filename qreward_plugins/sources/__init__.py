"""What answers requests: endpoints over HTTP, and local functions.

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

__all__ = ["FunctionSource", "OpenAISource", "Reply", "Request", "Source", "open_source"]

_HOMES = {"FunctionSource": "function", "OpenAISource": "openai"}


def open_source(name: str, config: models.OpenAISource | models.FunctionSource) -> Source:
    """Make the source `name` of the configuration. It connects, and starts workers, with its first request.

    Raises ConfigurationError for what only the environment shows: an unset key, a function that cannot be loaded.
    """
    from .function import FunctionSource
    from .openai import OpenAISource

    if config.kind == "openai":
        return OpenAISource(name, config)
    return FunctionSource(name, config)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
