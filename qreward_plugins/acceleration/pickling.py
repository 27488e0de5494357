"""Pickles accelerated functions: by name where the other process can import it, by value for Ray where it cannot.

The other process has limits of its own, unless the function is `shared`.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import TYPE_CHECKING, Any

from .calls import FunctionCalls
from .options import Options
from .source import Kind

if TYPE_CHECKING:
    from .functions import Accelerated


def reduced(function: Accelerated) -> Any:
    """What `__reduce__` of an accelerated function returns. Raises `PicklingError` for one without a name."""
    module, name = function.__module__, getattr(function, "__qualname__", "")
    found = _found(module, name)
    if found is function:
        cloud = sys.modules.get("ray.cloudpickle") or sys.modules.get("cloudpickle")
        if module != "__main__" or cloud is None:
            return name
        # Another process may have another main module. cloudpickle carries its functions by value.
        return _unpickled, (type(function), function._calls.kind, _content(cloud, function))
    original = getattr(found, "_calls", None) is function._calls
    if original:
        # A bound method, or a view with other options.
        return _view, (module, name, function._options, function._bound)
    cloud = sys.modules.get("ray.cloudpickle") or sys.modules.get("cloudpickle")
    if cloud is None:
        raise pickle.PicklingError(f"cannot pickle {function!r}: {module}.{name} is not this function")
    return _unpickled, (type(function), function._calls.kind, _content(cloud, function), function._bound)


def _found(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _content(cloud: Any, function: Accelerated) -> Any:
    return cloud.dumps((function.__wrapped__, function._options))


def _unpickled(made: type[Accelerated], kind: Kind, content: bytes, bound: tuple[Any, ...] = ()) -> Any:
    function, options = pickle.loads(content)
    again = made(function, FunctionCalls(function, kind, options), options)
    return again._copy(bound=bound) if bound else again


def _view(module: str, name: str, options: Options, bound: tuple[Any, ...]) -> Any:
    importlib.import_module(module)
    return _found(module, name)._copy(options, bound)
