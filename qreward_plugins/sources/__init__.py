"""Sources answer requests: language models and scoring services over HTTP, local functions, and your own kinds.

The names of `_HOMES` are imported on first use: a worker process of a function imports this package, too, and needs no
HTTP client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .base import Reply as Reply
from .base import Request as Request
from .base import Source as Source

if TYPE_CHECKING:
    from ..config.source_models import EndpointConfig as EndpointConfig
    from ..config.source_models import FreeMapping as FreeMapping
    from ..config.source_models import ModelName as ModelName
    from ..config.source_models import SourceConfig as SourceConfig
    from ..config.source_models import URLs as URLs
    from .endpoint import Endpoint as Endpoint
    from .function import FunctionSource as FunctionSource
    from .kind import LOGITS as LOGITS
    from .kind import TEXT as TEXT
    from .kind import VALUE as VALUE
    from .kind import VECTORS as VECTORS
    from .kind import SourceKind as SourceKind
    from .kind import kind_of as kind_of
    from .kind import open_source as open_source
    from .replies import Answer as Answer
    from .replies import Problem as Problem
    from .replies import announced_limits as announced_limits
    from .replies import json_of as json_of
    from .replies import retry_after_s as retry_after_s
    from .replies import usage_of as usage_of

_NAMES = {
    ".endpoint": "Endpoint",
    ".function": "FunctionSource",
    ".kind": "LOGITS TEXT VALUE VECTORS SourceKind kind_of open_source",
    ".replies": "Answer Problem announced_limits json_of retry_after_s usage_of",
    "..config.source_models": "EndpointConfig FreeMapping ModelName SourceConfig URLs",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
