"""Sources answer requests: language models and scoring services over HTTP, local functions, and your own kinds.

The names are imported on first use: a worker process of a function imports this package, too, and needs no HTTP client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .base import Reply, Request, Source

if TYPE_CHECKING:
    from ..config.source_models import EndpointConfig, FreeMapping, ModelName, SourceConfig, URLs
    from .endpoint import Endpoint
    from .function import FunctionSource
    from .kind import LOGITS, TEXT, VALUE, VECTORS, SourceKind
    from .opening import kind_of, open_source
    from .rate_limit_headers import announced_limits, retry_after_s
    from .replies import Answer, Problem, json_of, usage_of

__all__ = [
    "LOGITS",
    "TEXT",
    "VALUE",
    "VECTORS",
    "Answer",
    "Endpoint",
    "EndpointConfig",
    "FreeMapping",
    "FunctionSource",
    "ModelName",
    "Problem",
    "Reply",
    "Request",
    "Source",
    "SourceConfig",
    "SourceKind",
    "URLs",
    "announced_limits",
    "json_of",
    "kind_of",
    "open_source",
    "retry_after_s",
    "usage_of",
]

_NAMES = {
    ".endpoint": "Endpoint",
    ".function": "FunctionSource",
    ".kind": "LOGITS TEXT VALUE VECTORS SourceKind",
    ".opening": "kind_of open_source",
    ".rate_limit_headers": "announced_limits retry_after_s",
    ".replies": "Answer Problem json_of usage_of",
    "..config.source_models": "EndpointConfig FreeMapping ModelName SourceConfig URLs",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
