"""Loads a user's function by its path, reports why it cannot be loaded, and describes what it raises.

A path names a module (`package.module:name`) or a file (`path/to/file.py:name`). The module name of a file depends only
on its path, so that objects of its classes can be pickled between this process and the workers.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..errors import ConfigurationError, Mistake

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The folder of this package."""
_OF_A_FILE = "qreward_function_"
"""Begins the name of a module that a file was loaded as."""
GUARD = 'below `if __name__ == "__main__":`, because its file is imported for the function.'
_importing = threading.local()

Function = Callable[..., Any]
Loader = Callable[[], Function]
"""Returns the function. It must pickle, because each worker process calls it."""


class FunctionNotFound(ImportError):
    """There is no such function. The message is complete; the type of the error adds nothing."""


class PathLoader:
    """Loads the function at `path`; picklable."""

    def __init__(self, path: str) -> None:
        self.path = path
        where, _, self._dotted = path.rpartition(":")
        self._where = absolute(os.path.expanduser(where)) if where.endswith(".py") else where

    def __call__(self) -> Function:
        """Import the module and return the function.

        Raises FunctionNotFound, or whatever the module itself raises.
        """
        where, dotted = self._where, self._dotted
        outer, _importing.name = importing(), os.path.basename(where)
        try:
            found: Any = _import_file(where) if where.endswith(".py") else _import_module(where)
        finally:
            _importing.name = outer
        for name in dotted.split("."):
            if not hasattr(found, name):
                raise FunctionNotFound(no_such_name(found, where, name))
            found = getattr(found, name)
        if not callable(found):
            raise FunctionNotFound(f"{dotted} of {where} is of type {type(found).__name__}, not a function.")
        return found  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"PathLoader({self.path!r})"


def importing() -> str:
    """The file or module that this thread is importing for a function; "" if there is none."""
    return getattr(_importing, "name", "")


def absolute(path: str) -> str:
    """Return a path that a later `chdir` does not change. One without a file or folder now stays as it is."""
    try:
        return os.path.abspath(path) if os.path.exists(path or ".") else path
    except OSError:  # there is no working directory
        return path


def load(loader: Loader, *, key: str, excerpt: Callable[[str], str] = str) -> Function:
    """Call `loader` and return the function.

    `key` is the place in the configuration, for messages. `excerpt` redacts the text of an exception of the module.

    Raises ConfigurationError.
    """
    try:
        function = loader()
        if not callable(function):
            raise FunctionNotFound(f"the loader returned an object of type {type(function).__name__}, not a function.")
        return function
    except (Exception, SystemExit) as error:
        mistake = Mistake(key, f"the function cannot be loaded: {why_not_loaded(error, excerpt)}")
    # Raised outside the `except`, so that it has no `__context__`: the text of the foreign error may hold secrets.
    raise ConfigurationError([mistake])


def why_not_loaded(error: BaseException, excerpt: Callable[[str], str] = str) -> str:
    """Describe the error of a loader. What another module raised goes through `excerpt`."""
    return str(error) if isinstance(error, FunctionNotFound) else excerpt(describe(error))


def origin_of(function: Callable[..., Any]) -> tuple[object, ...]:
    """Return what identifies a function: its name, a digest of its file, and its bound arguments, of any type.

    It looks inside `functools.partial`, decorators, and functions among the bound arguments.
    """
    if isinstance(function, PathLoader):
        return ("path", function.path)
    if isinstance(function, functools.partial):
        bound = [origin_of(value) if callable(value) else value for value in function.args]
        named = {key: origin_of(value) if callable(value) else value for key, value in function.keywords.items()}
        return ("partial", origin_of(function.func), bound, named)
    inner = getattr(function, "__wrapped__", None)
    within = origin_of(inner) if callable(inner) else None
    plain = inspect.isroutine(function) or inspect.isclass(function)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    return ("function", name, _file_digest(function if plain else type(function)), within)


def _file_digest(defined: Any) -> bytes | None:
    """Return a digest of the file that defines the object; None if no file can be read."""
    try:
        path = inspect.getsourcefile(defined)
        if path is None:
            return None
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).digest()
    except (OSError, TypeError):
        return None


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An existing module may fail to import another one. That error passes through.
        if name.startswith(_OF_A_FILE):
            raise FunctionNotFound(f"put the call {GUARD}") from None
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise FunctionNotFound(f"there is no module {error.name!r} on the Python path.") from None
        raise


def _import_file(path: str) -> ModuleType:
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        raise FunctionNotFound(f"there is no file {path!r} (a relative path begins at the current directory).")
    digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    name = f"{_OF_A_FILE}{os.path.basename(path)[:-3]}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FunctionNotFound(f"{path!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as the import system does: dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def no_such_name(owner: Any, where: str, name: str) -> str:
    """Say that `owner`, which messages call `where`, has no attribute `name`, and which is near."""
    near = difflib.get_close_matches(name, [known for known in dir(owner) if not known.startswith("__")], n=1)
    return f"{where} has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else ".")


def describe(error: BaseException) -> str:
    """Return its type, its message, and the line that raised it."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be read)"
    # The last line of the user's code: frames of this package, of the import system and of dataclasses are skipped.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<frozen ", "<string>"))
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}"


def is_async(function: Function) -> bool:
    """Whether a call of the function is awaited, inside `functools.partial`, too."""
    while isinstance(function, functools.partial):
        function = function.func
    # The second test is for objects whose class defines `async def __call__`.
    return inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        inspect.getattr_static(type(function), "__call__")
    )


def is_transient(error: BaseException) -> bool:
    """Whether another try may help: the error is a time-out or a lost connection."""
    # Compared by name: until Python 3.11, asyncio and concurrent.futures have a TimeoutError of their own.
    return isinstance(error, ConnectionError) or any(kind.__name__ == "TimeoutError" for kind in type(error).__mro__)
