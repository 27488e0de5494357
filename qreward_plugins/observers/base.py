"""Calls observers with events.

An observer is a callable that takes an event. The engine calls it in the thread of its event loop, in the order of
events, and waits for it. So an observer must return at once, and do slow work in a thread of its own. Engines in
several threads may call a shared observer at the same time.

An observer never changes an outcome. If it raises, it gets no more events, and one warning names it.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..errors import ConfigurationError, Mistake
from ..secrets import described_error, one_line
from ..system.functions import PathLoader, load
from .events import EngineClosed, Event, SourceStateChanged

if TYPE_CHECKING:
    from .statistics import Statistics

_FACTORY_CHARS = 300
_REMEDY = "An observer is a function, or an object with `__call__`, that takes one event."


def load_observers(paths: Sequence[str]) -> list[Named]:
    """Import the factories at `paths` and call each without arguments. Return their observers, named by the paths.

    A path is `package.module:factory` or `path/to/file.py:factory`. Raises `ConfigurationError` with every path that
    gives no observer.
    """
    found: list[Named] = []
    mistakes: list[Mistake] = []
    for number, path in enumerate(paths):
        try:
            found.append((path, _made(path, f"observers[{number}]")))
        except ConfigurationError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigurationError(mistakes)
    return found


def _made(path: str, key: str) -> Observer:
    factory = load(PathLoader(path), key=key, excerpt=lambda text: one_line(text, _FACTORY_CHARS))
    try:
        made: Any = factory()
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"the factory {path} raised {described_error(error, _FACTORY_CHARS)}."
    else:
        if callable(made):
            return made  # type: ignore[no-any-return]
        problem = f"the factory {path} returned an object of type {_name(made)}, which cannot be called."
    # Raised outside the `except`, so that its context does not hold the factory's error.
    raise ConfigurationError([Mistake(key, problem, _REMEDY)])


_log = logging.getLogger("qreward_plugins.observers")

_NAME_CHARS = 120
_MESSAGE_CHARS = 200


class Observer(Protocol):
    """Called with every event, in the event loop. Its return value is ignored."""

    def __call__(self, event: Event, /) -> object: ...


Named: TypeAlias = tuple[str, Observer]
"""An observer and its name in warnings."""


class Reader(Protocol):
    """An observer of this package, which handles some types of events."""

    def reads(self) -> Mapping[type, Callable[[Any], None]]: ...


class Observers:
    """Sends events to the observers of an engine.

    `ours` are observers of this package: they are quick, do not raise, and name the events that they read. `theirs` are
    the user's, with their names. `statistics` counts what happens, with or without observers.
    """

    def __init__(self, statistics: Statistics, ours: Iterable[Reader] = (), theirs: Iterable[Named] = ()) -> None:
        self.statistics = statistics
        self._readers: dict[type, list[Callable[[Any], None]]] = {}
        for reader in ours:
            for kind, read in reader.reads().items():
                self._readers.setdefault(kind, []).append(read)
        self._theirs = list(theirs)
        self.watched = bool(self._theirs)
        """Whether the user has an observer. Events that only users read are emitted only then."""
        self._states: dict[str, str] = {}

    def reads(self, kind: type[Event]) -> bool:
        """Whether somebody reads events of this type."""
        return self.watched or kind in self._readers

    def emit(self, event: Event) -> None:
        """Send an event to all observers. Call it from the event loop. Raises nothing."""
        for read in self._readers.get(type(event), ()):
            read(event)
        if self._theirs:
            self._send(event)

    def state(self, at: float, source: str, state: str, problem: str) -> None:
        """Emit the state of a source if it has changed."""
        before = self._states.get(source, "up")
        if state != before:
            self._states[source] = state
            self.emit(SourceStateChanged(at, source, state, before, one_line(problem, _MESSAGE_CHARS)))

    def close(self, at: float) -> None:
        """Send `EngineClosed` to the user's observers, and release them. May be called again."""
        if self._theirs:
            self._send(EngineClosed(at))
            self._theirs.clear()
            self.watched = False

    def _send(self, event: Event) -> None:
        for each in tuple(self._theirs):
            name, observer = each
            problem = _problem_with(observer, event)
            if problem and each in self._theirs:
                self._theirs.remove(each)
                self.watched = bool(self._theirs)
                _log.warning("observer %s %s; it gets no more events, and scoring goes on", name, problem)


def _problem_with(observer: Observer, event: Event) -> str:
    """Send an observer an event; return why it must be cut off, else ""."""
    try:
        returned = observer(event)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A CancelledError or SystemExit would end the scheduler's step as well.
        problem = _described(error)
        # The observer may keep the error, and its frames refer to the scheduler's jobs.
        error.__traceback__ = None
        return f"raised {problem}"
    if inspect.iscoroutine(returned):
        returned.close()
        return "returned a coroutine: an observer is a plain function"
    return ""


def with_names(observers: Iterable[Observer] | Observer) -> list[Named]:
    """The observers, or the single one, with their names. Raises `ConfigurationError` for an object that is none."""
    given: list[Any] = list(observers) if isinstance(observers, Iterable) else [observers]
    mistakes = [
        Mistake(f"observers[{number}]", f"{_name(one)} is no observer.", _REMEDY)
        for number, one in enumerate(given)
        if isinstance(one, type) or not callable(one)
    ]
    if mistakes:
        raise ConfigurationError(mistakes, origin="observers")
    return [(_name(observer), observer) for observer in given]


def _name(observer: Any) -> str:
    # Not its repr, which may show bound arguments.
    name = getattr(observer, "__qualname__", None) or type(observer).__qualname__
    return one_line(str(name), _NAME_CHARS)


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return described_error(error) + one_line(where, _MESSAGE_CHARS)
