"""The entry point of the group `verl.plugins`: importing it registers `qreward` with verl.

verl imports this in every process and logs errors at level DEBUG only (verl/__init__.py). Then the run would end with
"reward manager is not registered" and no reason, so errors are logged here.
"""

from __future__ import annotations

import logging
from importlib import import_module

from .trainers import found

_log = logging.getLogger("verl_adapter")

NAME = "qreward"


def register() -> list[str]:
    """Register the managers in every registry that this verl has; return the modules of those registries."""
    registered = []
    for registry, home, name in (
        ("verl.experimental.reward_loop.reward_manager", "verl_adapter.manager", "QRewardManager"),
        ("verl.workers.reward_manager", "verl_adapter.batch", "QRewardBatchManager"),
    ):
        if register_in := found(registry, "register"):
            register_in(NAME)(getattr(import_module(home), name))
            registered.append(registry)
    return registered


def _load() -> None:
    try:
        registered = register()
    except Exception:
        _log.exception("qreward could not register its reward manager with verl")
        raise
    if not registered:
        _log.error("qreward found no registry of reward managers in this verl; verl 0.4 or later is required")


_load()
