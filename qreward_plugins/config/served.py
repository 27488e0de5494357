"""Checks the tree of a process whose samples a reward server scores (`engine.server`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

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
