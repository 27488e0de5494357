"""Modules that take seconds to import: only the tests that need them pay for that. pytest-xdist collects all tests in
each of its processes.
"""

from __future__ import annotations

import importlib
import warnings
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


def later(name: str) -> Any:
    """The module of this name, which is imported when it is first used. Where its package is not installed, the tests
    of the file that asks for it are skipped.
    """
    package = name.partition(".")[0]
    if find_spec(package) is None:
        reason = f"{package} is not installed (pip install 'qreward-plugins[demo]')"
        pytest.skip(reason, allow_module_level=True)
    return _Module(name)


def imported(name: str) -> ModuleType:
    """Import a module of another package, whose warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


class _Module:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_pytest", "pytest")):  # pytest looks for its marks
            raise AttributeError(name)
        return getattr(imported(self._name), name)
