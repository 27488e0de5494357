"""The modules of the CPU recipe, which are scripts beside each other and not a package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

CPU = Path(__file__).parents[2] / "recipes" / "verl" / "cpu"
_NAMES = ("scorer", "tasks", "training", "demo")


@pytest.fixture(scope="session")
def cpu_recipe():
    """`scorer`, `tasks`, `training` and `demo` as attributes."""
    pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install 'qreward-plugins[demo]')")
    sys.path.insert(0, str(CPU))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in _NAMES}, folder=CPU)
    finally:
        sys.path.remove(str(CPU))
        for name in _NAMES:
            sys.modules.pop(name, None)
