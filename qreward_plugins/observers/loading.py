"""Loads the observers that a configuration names: factories by their paths, or by registered names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

from ..errors import ConfigurationError, Mistake
from ..secrets import described_error, one_line
from ..system.functions import PathLoader, load
from .base import Named, Observer, check

GROUP = "qreward_plugins.observers"
"""The entry points under which packages register factories of observers."""

_MESSAGE_CHARS = 300


def load_observers(paths: Sequence[str]) -> list[Named]:
    """Import the factories at `paths` and call each without arguments. Return their observers, named by the paths.

    A path is `package.module:factory`, `path/to/file.py:factory`, or a name that a package registers as an entry point
    of the group `qreward_plugins.observers`. Raises `ConfigurationError` with every path that gives no observer.
    """
    found: list[Named] = []
    mistakes: list[Mistake] = []
    for number, path in enumerate(paths):
        key = f"observers[{number}]"
        try:
            observer = _made(path, key)
            check([(key, observer)])
        except ConfigurationError as error:
            mistakes += error.mistakes
        else:
            found.append((path, observer))
    if mistakes:
        raise ConfigurationError(mistakes)
    return found


def _made(path: str, key: str) -> Observer:
    factory = load(PathLoader(path if ":" in path else _registered(path, key)), key=key, excerpt=_excerpt)
    try:
        made: Any = factory()
    except (Exception, SystemExit) as error:
        problem = f"the factory {path} raised {described_error(error, _MESSAGE_CHARS)}."
    else:
        if not inspect.iscoroutine(made):
            return made  # type: ignore[no-any-return]
        made.close()
        problem = f"the factory {path} is asynchronous."
    # Raised outside the `except`, so that its context does not hold the factory's error.
    raise ConfigurationError(
        [Mistake(key, problem, "A factory is a function without arguments that returns an observer.")]
    )


def _registered(name: str, key: str) -> str:
    """The path of the factory that a package registers as `name`."""
    try:
        points = list(metadata.entry_points(group=GROUP))
    except Exception as error:
        problem = f"the entry points of installed packages cannot be read: {described_error(error, _MESSAGE_CHARS)}."
        raise ConfigurationError([Mistake(key, problem)]) from None
    paths = sorted({point.value.partition("[")[0].strip() for point in points if point.name == name})
    if len(paths) == 1:
        return paths[0]
    if paths:
        problem = f"several packages register the observer {name!r}: {' and '.join(paths)}."
        raise ConfigurationError([Mistake(key, problem, "Name the factory by its path.")])
    raise ConfigurationError([Mistake(key, f"no package registers the observer {name!r}.", _remedy(name, points))])


def _remedy(name: str, points: Iterable[Any]) -> str:
    names = sorted({str(point.name) for point in points})
    near = difflib.get_close_matches(name, names, n=1)
    known = f"Registered: {', '.join(names)}." if names else "None is registered."
    return f"{f'Did you mean {near[0]!r}? ' if near else ''}{known} Or write the path `package.module:factory`."


def _excerpt(text: str) -> str:
    return one_line(text, _MESSAGE_CHARS)
