"""Environment variables that a configuration is read with: this process's, or those of another.

`${oc.env:NAME}` is resolved by OmegaConf, which reads `os.environ`. To read a configuration as another process would,
its variables must not be written there: other threads read them, too. So they are kept in a context variable, and
OmegaConf is given a resolver that asks it.
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
    """The variables that hold here: those of `environment_of`, else those of this process."""
    variables = _variables.get()
    return os.environ if variables is None else variables


@contextmanager
def environment_of(variables: Mapping[str, str] | None) -> Iterator[None]:
    """Have `environment` and `${oc.env:NAME}` read these variables in this context; None: those of this process. Other
    threads and tasks read what they read before.
    """
    if variables is None:
        yield
        return
    # Each time, because anybody may reset OmegaConf's resolvers. Elsewhere it answers as OmegaConf's own.
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
