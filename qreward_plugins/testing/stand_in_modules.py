"""Stand-ins for modules of a framework that is not installed, with the few names that reward code imports."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def stand_in_modules(
    contents: Mapping[str, Mapping[str, Any]],
    *,
    proof: str,
    over_installed: bool = False,
    anew: Collection[str] = (),
) -> Iterator[bool]:
    """Put modules and their packages into `sys.modules` while the context is open. `contents` maps full names to their
    attributes.

    `proof` is a module that only the real framework has, because other projects use the same package names. If it can
    be found, nothing happens, unless `over_installed`. Yields whether the stand-ins are in place. Leaving the context
    restores the former modules; objects imported meanwhile stay. Packages in `anew` are imported again in the context,
    and restored after it. For one thread at a time.
    """
    if not over_installed and _is_installed(proof):
        yield False
        return
    packages = {".".join(name.split(".")[:depth]) for name in contents for depth in range(1, name.count(".") + 1)}
    contents = dict(sorted({**{name: {} for name in packages}, **contents}.items()))
    roots = {name.split(".")[0] for name in contents}
    before = _taken_out(roots | set(anew))
    made: dict[str, ModuleType] = {}
    for name, held in contents.items():
        module = ModuleType(name, "A stand-in of qreward_plugins.testing, for tests without the framework.")
        module.__path__ = []
        vars(module).update(held)
        made[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    sys.modules.update(made)
    try:
        yield True
    finally:
        _taken_out(set(anew))
        for name, module in made.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name not in sys.modules})


def _taken_out(roots: set[str]) -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in roots}


def _is_installed(proof: str) -> bool:
    try:
        return importlib.util.find_spec(proof) is not None
    except (ImportError, ValueError):
        return False
