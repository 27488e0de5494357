"""The configuration: one tree of sources, judges, routes and engine settings, read and checked as a whole.

`load_config` reads it, and reports all mistakes at once, each with its place. A trainer takes minutes to start, so
reporting one mistake per start would cost a user much time.
"""

from __future__ import annotations

from .judge_models import AskingConfig, JudgeConfig
from .load import load_config, load_layers
from .models import (
    Config,
    Constant,
    FailurePolicy,
    Groups,
    JournalConfig,
    ModelRoute,
    Route,
    Scheduling,
    Strategy,
)
from .routes import (
    judge_for,
    judges_asked,
    judges_in_charge,
    own_sources,
    parts_of,
    priority_of,
    routes_of,
    sources_for_model,
    sources_of,
    sources_of_models,
)
from .several_keys import configured_name
from .source_models import Batch, Budget, EndpointConfig, Limits, Price, SourceConfig
from .yaml_file import read_yaml

__all__ = [
    "AskingConfig",
    "Batch",
    "Budget",
    "Config",
    "Constant",
    "EndpointConfig",
    "FailurePolicy",
    "Groups",
    "JournalConfig",
    "JudgeConfig",
    "Limits",
    "ModelRoute",
    "Price",
    "Route",
    "Scheduling",
    "SourceConfig",
    "Strategy",
    "configured_name",
    "judge_for",
    "judges_asked",
    "judges_in_charge",
    "load_config",
    "load_layers",
    "own_sources",
    "parts_of",
    "priority_of",
    "read_yaml",
    "routes_of",
    "sources_for_model",
    "sources_of",
    "sources_of_models",
]
