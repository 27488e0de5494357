"""The modules of the CPU recipe, which are scripts beside each other and not a package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
CPU = RECIPES / "verl" / "cpu"
_NAMES = ("scorer", "tasks", "training", "llama_server", "demo")


@pytest.fixture(scope="session")
def cpu_recipe():
    """The modules in `_NAMES` as attributes."""
    pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install 'qreward-plugins[demo]')")
    sys.path.insert(0, str(CPU))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in _NAMES}, folder=CPU)
    finally:
        sys.path.remove(str(CPU))
        for name in _NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def recipe_tools():
    """`prepare_data`, `dry_run`, and the modules of `dataset` and `dryrun` that need no framework, as attributes."""
    sys.path.insert(0, str(RECIPES))
    try:
        names = ("prepare_data", "dry_run")
        parts = {
            "dataset": ("files", "formats", "checks"),
            "dryrun": ("lines", "machine", "data_lines", "judging", "roll_recipe"),
        }
        loaded = {name: importlib.import_module(name) for name in names}
        loaded |= {name: importlib.import_module(f"{room}.{name}") for room, found in parts.items() for name in found}
    finally:
        # At once, because its folders `roll` and `slime` would be packages for other tests.
        sys.path.remove(str(RECIPES))
    try:
        yield SimpleNamespace(**loaded)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in (*names, *parts)]:
            sys.modules.pop(name)


@pytest.fixture(autouse=True)
def journal_of_its_own(monkeypatch, tmp_path):
    """The recipes record verdicts; without this variable, in the current folder."""
    monkeypatch.setenv("QREWARD_JOURNAL", str(tmp_path / "qreward.sqlite"))
