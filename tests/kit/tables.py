"""What keeps the collection of tests quick: a table of cases as one test, since hundreds of tests of microseconds cost
seconds to collect and to set up; and modules that take seconds to import, which only the tests pay for that need them
(pytest-xdist collects all tests in each of its processes).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def each_of(
    names: str | tuple[str, ...], cases: Iterable[Any] | Callable[[], Iterable[Any]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test for each case, in one test; the signature is that of `pytest.mark.parametrize`, but `cases` may be a
    function that returns them, which is called when the test runs.

    All cases share the fixtures of the test, so these must not remember what a case did. The error of a case carries
    the case as a note.
    """
    keys = (names,) if isinstance(names, str) else tuple(names)

    @functools.cache
    def table() -> list[dict[str, Any]]:
        rows = [(case,) if len(keys) == 1 else tuple(case) for case in (cases() if callable(cases) else cases)]
        return [dict(zip(keys, row, strict=True)) for row in rows]

    if not callable(cases):
        table()

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **fixtures: Any) -> None:
            assert table(), "a table without a case proves nothing"
            for case in table():
                with _noted(case):
                    test(*args, **fixtures, **case)

        async def run_async(*args: Any, **fixtures: Any) -> None:
            assert table(), "a table without a case proves nothing"
            for case in table():
                with _noted(case):
                    await test(*args, **fixtures, **case)

        runs = functools.wraps(test)(run_async if inspect.iscoroutinefunction(test) else run)
        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        runs.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return runs

    return decorate


@contextmanager
def _noted(case: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if hasattr(error, "add_note"):
            error.add_note(f"case: {case!r}"[:2000])
        raise


# Modules


def later(name: str) -> Any:
    """The module of this name, which is imported when it is first used. Where its package is not installed, the tests
    of the file that asks for it are skipped.
    """
    package = name.partition(".")[0]
    if find_spec(package) is None:
        reason = f"{package} is not installed (pip install 'qreward-plugins[demo]')"
        pytest.skip(reason, allow_module_level=True)
    return _Module(name)


@contextmanager
def scripts(folder: Path, *names: str) -> Iterator[SimpleNamespace]:
    """Modules that lie beside each other in a folder and are no package, by the last part of their names."""
    sys.path.insert(0, str(folder))
    try:
        found = {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    finally:
        # At once: a folder in it may have the name of a package.
        sys.path.remove(str(folder))
    try:
        yield SimpleNamespace(**found)
    finally:
        roots = {name.partition(".")[0] for name in names}
        for name in [name for name in sys.modules if name.partition(".")[0] in roots]:
            sys.modules.pop(name)


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
