"""Checks the tree of a process that uses a reward server (`engine.server`), and reads the token of the server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from ..errors import ConfigurationError, Mistake
from .findings import Finding

_TOP = ("sources", "judges", "routes")
_ENGINE = ("journal", "max_attempts", "scheduling")


def names_server(tree: Any) -> bool:
    """Whether a tree names a reward server."""
    engine = tree.get("engine") if isinstance(tree, (Mapping, DictConfig)) else None
    return isinstance(engine, (Mapping, DictConfig)) and bool(engine.get("server"))


def is_for_clients(tree: Mapping[str, Any]) -> bool:
    """Whether a tree serves clients of models only, and scores nothing."""
    return bool(tree.get("models")) and "judges" not in tree


def check_served(tree: dict[str, Any]) -> list[Finding]:
    """Return a finding for each key that counts at the server only, and remove these keys from `tree`."""
    findings = []
    for place, keys in (((), _TOP), (("engine",), _ENGINE)):
        node = tree[place[0]] if place else tree
        for key in keys:
            if node.get(key):
                problem = "the reward server of `engine.server` has its own"
                findings.append(Finding((*place, key), problem, "Remove it here, and set it in the server's file."))
            node.pop(key, None)
    return findings


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
