"""Reads the token of a reward server."""

from __future__ import annotations

import os

from ..errors import ConfigurationError, Mistake


def server_token(variable: str | None, path: str) -> str | None:
    """Return the token in an environment variable; None if no variable is named. `path` is the place of the server in
    the configuration. Raises `ConfigurationError` if the variable is not set.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        problem = f"the environment variable {variable} is not set."
        raise ConfigurationError([Mistake(f"{path}.token_env", problem, "Set it to the token of the reward server.")])
    return token
