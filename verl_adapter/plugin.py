"""The entry point of the group `verl.plugins`: importing it registers `qreward` with verl.

verl imports this in every process and logs errors at level DEBUG only (verl/__init__.py). Then the run would end with
"reward manager is not registered" and no reason, so errors are logged here. verl 0.9 also ignores, without a message,
the key that selected reward managers up to 0.8; a warning says so. Only the program of fully_async still reads it
(fully_async_main.py: `migrate_legacy_reward_impl`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module

_log = logging.getLogger("verl_adapter")

NAME = "qreward"
_LEGACY_KEY = "reward_model.reward_manager"
_KEY = "reward.reward_manager.name"
_READS_LEGACY_KEY = "fully_async_main"
"""The module of the one program that still reads it."""


def register() -> list[str]:
    """Register the managers in every registry that this verl has; return the modules of those registries."""
    registered = []
    for registry, home, name in (
        ("verl.experimental.reward_loop.reward_manager", "verl_adapter.manager", "QRewardManager"),
        ("verl.workers.reward_manager", "verl_adapter.batch", "QRewardBatchManager"),
    ):
        try:
            register_in = import_module(registry).register
        except (ModuleNotFoundError, AttributeError):
            continue  # this version of verl has no such registry
        register_in(NAME)(getattr(import_module(home), name))
        registered.append(registry)
    return registered


def ignored_selection(command: Sequence[str], arguments: Sequence[str]) -> str | None:
    """The command-line override that asks for qreward in a way that this verl ignores, if there is one. `command` names
    the program: with `python -m`, `sys.argv[0]` is "-m" until the module is found, and verl is imported before.
    """
    if any(part.removesuffix(".py").endswith(_READS_LEGACY_KEY) for part in command):
        return None
    chosen = [argument for argument in arguments if argument.lstrip("+").startswith(f"{_LEGACY_KEY}=")]
    selected = any(argument.lstrip("+").startswith((f"{_KEY}=", "reward_manager=")) for argument in arguments)
    if chosen and chosen[-1].endswith(f"={NAME}") and not selected and _drops_legacy_key():
        return chosen[-1]
    return None


def _drops_legacy_key() -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        major, minor = (int(part) for part in version("verl").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return False
    return (major, minor) >= (0, 9)


def _load() -> None:
    try:
        registered = register()
    except Exception:
        _log.exception("qreward could not register its reward manager with verl")
        raise
    if not registered:
        _log.error("qreward found no registry of reward managers in this verl; verl 0.4 or later is required")
    override = ignored_selection(sys.orig_argv, sys.argv[1:])
    if override is not None:
        _log.warning("this verl ignores %r; select the reward manager with %s=%s", override, _KEY, NAME)


_load()
