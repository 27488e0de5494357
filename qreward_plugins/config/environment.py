"""Provides the environment variables for reading a configuration: those of this process or of another one.

OmegaConf resolves `${oc.env:NAME}` from `os.environ`. To read a configuration with the variables of another process,
this module stores them in a context variable and registers a resolver that reads it. Writing them to `os.environ` would
affect other threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from omegaconf import OmegaConf

_variables: ContextVar[Mapping[str, str] | None] = ContextVar("qreward_environment", default=None)


def environment() -> Mapping[str, str]:
    """Return the variables of the enclosing `environment_of`, or those of this process."""
    variables = _variables.get()
    return os.environ if variables is None else variables


@contextmanager
def environment_of(variables: Mapping[str, str] | None) -> Iterator[None]:
    """Make `environment` and `${oc.env:NAME}` read these variables in this context; None: those of this process. Other
    threads and tasks are not affected.
    """
    if variables is None:
        yield
        return
    # Registered each time, because other code may reset the resolvers. Outside this context it acts as OmegaConf's own.
    OmegaConf.register_new_resolver("oc.env", _variable, replace=True)
    token = _variables.set(variables)
    try:
        yield
    finally:
        _variables.reset(token)


def _variable(name: str, *default: Any) -> str | None:
    """OmegaConf's `oc.env` (omegaconf/resolvers/oc), over `environment`."""
    value = environment().get(name)
    if value is not None:
        return value
    if not default:
        raise KeyError(f"Environment variable '{name}' not found")
    return None if default[0] is None else str(default[0])
