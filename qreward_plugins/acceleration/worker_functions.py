"""Loads an accelerated function in worker processes, and brings its values and exceptions back."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from ..errors import ConfigurationError, Mistake
from ..system.functions import PathLoader, describe
from .notes import add_origin


class WorkerLoader:
    """Loads the function in a worker process; picklable. `path` is `module:name` or `file.py:name`."""

    def __init__(self, path: str) -> None:
        self._loader = PathLoader(path)

    def __call__(self) -> Callable[..., Any]:
        found = self._loader()
        return ResultOrError(getattr(found, "__wrapped__", found))


class ResultOrError:
    """Calls the function, and returns (True, its value) or (False, its exception)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        try:
            return True, self._function(*args, **kwargs)
        except BaseException as error:
            where = describe(error)
            try:
                content = pickle.dumps(error)
                pickle.loads(content)
            except Exception:
                # An exception that cannot be pickled is replaced by one with its type and message.
                content = pickle.dumps(RuntimeError(where))
            return False, (content, where)


def result_of(content: tuple[bool, Any]) -> Any:
    """Return the value that a worker process sent. Raises the exception that it sent."""
    fine, value = content
    if fine:
        return value
    error: BaseException = pickle.loads(value[0])
    add_origin(error, value[1])
    raise error


def loader_of(function: Callable[..., Any]) -> WorkerLoader:
    """Return what loads `function` in another process. Raises `ConfigurationError` if it has no importable name."""
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", "")
    if not name or "<" in name or not module:
        problem = f"process needs a function that can be imported, and {name or function!r} is local."
        raise ConfigurationError(
            [Mistake("mode", problem, 'Define it at the top level of a module, or use mode="thread".')],
            origin="accelerate",
        )
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None:
            module = spec.name
        elif file is not None and file.endswith(".py"):
            module = os.path.abspath(file)
        else:
            problem = "process needs a function of a file, and this one was typed in."
            raise ConfigurationError(
                [Mistake("mode", problem, 'Put it into a module, or use mode="thread".')], origin="accelerate"
            )
    return WorkerLoader(f"{module}:{name}")
