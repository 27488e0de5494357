"""Calls the user's observers with events, and logs failed samples and bugs.

An observer is a callable that takes an event. The engine calls it in the thread of its event loop, in the order of
events, and waits for it. So an observer must return at once, and do slow work in a thread of its own. Engines in
several threads may call a shared observer at the same time.

An observer never changes an outcome. If it raises, it gets no more events, and one warning names it.
"""

from __future__ import annotations

import inspect
import logging
import math
import traceback
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..errors import ConfigurationError, Mistake
from ..samples import Failed
from ..secrets import Redactor, described_error, environment_secrets, one_line, secrets_in, with_secrets
from ..system.functions import PathLoader, describe, load
from .events import DETAIL_CHARS, NAME_CHARS, EngineClosed, Event, SampleEnded, SourceStateChanged

if TYPE_CHECKING:
    from ..config.models import Config
    from .statistics import Statistics

_log = logging.getLogger("qreward_plugins.observers")
_failure_log = logging.getLogger("qreward_plugins.engine")

COUNT_S = 60.0
"""Seconds after a line about a failure in which its cause is only counted."""

_FACTORY_CHARS = 300
_OBSERVER_CHARS = 120
_MESSAGE_CHARS = 200
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


class Observer(Protocol):
    """Called with every event, in the event loop. Its return value is ignored."""

    def __call__(self, event: Event, /) -> object: ...


Named: TypeAlias = tuple[str, Observer]
"""An observer and its name in warnings."""


class Observers:
    """Sends events to `theirs`, the user's observers with their names.

    `statistics` counts what happens, with or without observers. Failed samples are logged (`FailureLog`).
    """

    def __init__(self, statistics: Statistics, theirs: Iterable[Named] = ()) -> None:
        self.statistics = statistics
        self._failure_log = FailureLog()
        self._theirs = list(theirs)
        self.watched = bool(self._theirs)
        """Whether the user has an observer. Only then are events emitted, except the end of a failed sample."""
        self._states: dict[str, str] = {}

    def emit(self, event: Event) -> None:
        """Send an event to all observers. Call it from the event loop. Raises nothing."""
        if isinstance(event, SampleEnded):
            self._failure_log.ended(event)
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
    return one_line(str(name), _OBSERVER_CHARS)


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return described_error(error) + one_line(where, _MESSAGE_CHARS)


class FailureLog:
    """Warns of failed samples.

    The first failure of each kind (cause, reason, judge and source) is logged at once. Further ones are counted, and
    logged in one line at most every `COUNT_S` seconds.
    """

    def __init__(self) -> None:
        self._causes: dict[tuple[str, str, str], tuple[float, int]] = {}
        """When each was logged last, and how many more there were since then."""

    def ended(self, event: SampleEnded) -> None:
        """Warn of a failure, or of a floor in its place."""
        failed = event.outcome.failure
        if failed is None:
            return
        key = (failed.label, failed.judge, failed.source)
        logged_at, more = self._causes.get(key, (-math.inf, -1))
        waited_s, more = event.at - logged_at, more + 1
        if waited_s < COUNT_S:
            self._causes[key] = logged_at, more
            return
        self._causes[key] = event.at, 0
        before = f"{more} more samples ended in this way in the last {waited_s:.0f} s; the last was " if more else ""
        _failure_log.warning("%s%s", before, _failed_text(event, failed))


class BugLog:
    """Logs exceptions that are bugs in sources and judges of a configuration, whose secrets it redacts.

    The traceback is logged once for each type of exception and each source or judge; later ones at the level DEBUG.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._logged: set[str] = set()

    def log(self, error: BaseException, origin: str, log: logging.Logger) -> str:
        """Log `error`, which comes from `origin`, and return what the failure of a sample says of it."""
        message = f"unexpected {type(error).__name__} from {origin}"
        log.log(logging.DEBUG if message in self._logged else logging.ERROR, "%s", message, exc_info=error)
        self._logged.add(message)
        return f"unexpected {self._redactor.of(describe(error))}"

    @cached_property
    def _redactor(self) -> Redactor:
        return Redactor([*environment_secrets(), *secrets_in(with_secrets(self._config.model_dump()))])


def _failed_text(event: SampleEnded, failed: Failed) -> str:
    # Names come from data sets and details from servers, so both may contain line breaks and control characters.
    name = one_line(event.sample_id, NAME_CHARS) if event.sample_id else "sample"
    where = f" ({one_line(event.data_source, NAME_CHARS)})" if event.data_source else ""
    return f"{name}{where}: {one_line(failed.describe(), DETAIL_CHARS)}"
