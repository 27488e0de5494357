"""The options of `accelerate`: their units and their defaults."""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from os import PathLike
from typing import Any, Literal, TypeAlias, TypedDict

from ..config import Limits
from ..config.nodes import PRIORITIES
from ..errors import ConfigurationError, Mistake
from ..observers import Observer, with_names
from ..secrets import one_line
from .option_checks import mistakes_of, rate_of


class Unset(Enum):
    """Marks an option that was not given, where None is a value."""

    UNSET = "unset"


UNSET = Unset.UNSET

RetryOn: TypeAlias = "type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], object]"
Priority: TypeAlias = 'Literal["high", "normal", "low"] | int'
Shared: TypeAlias = Literal["off", "auto", "ray", "machine"]
Kind: TypeAlias = Literal["async", "sync", "async_generator", "generator"]
"""What a function is."""

LEARNED_SHARE = 0.3
"""Share of errors from which `adaptive=True` lowers the concurrency."""
FAILURES_TO_OPEN = 5
"""Failures in a row that open the circuit with `breaker=True`."""
BURST_S = 0.05
"""Seconds' worth of the rate that paced calls may start at once by default."""
MOST_THREADS = 1024


@dataclass(frozen=True)
class Options:
    """The options of one accelerated function. Times are seconds. `docs/functions.md` has a table of them.

    Raises `ConfigurationError` with all mistakes.
    """

    rate: str | float | None = None
    """Most calls in a time: "600/min", "10/s", "5000/hour", or a number of calls a second. Retries and hedges count.
    None: no limit."""
    burst: int | None = None
    """Calls that may start at once when none has started for a while, with `window="pace"`. None: what the rate allows
    in 0.05 s, at least 1."""
    window: Literal["pace", "sliding"] = "pace"
    """`pace`: calls start evenly spread. `sliding`: in any time of the unit of `rate` (a minute for "600/min") at most
    that many, all of them at once if they come at once."""
    key: Callable[..., object] | None = None
    """A function of the arguments. Calls with equal results share rate, concurrency and breaker; others have their own.
    For a method it gets the arguments without `self`. With `shared` it returns texts, numbers, or tuples of them. None:
    all calls share them."""
    idle_s: float = 600.0
    """After this time without a call, a key is forgotten, but not before its rate allows a whole burst again."""
    concurrency: int | None = None
    """Most calls at once. None: any number of an async function; 32 threads; as many processes as there are processors.
    """
    adaptive: bool | float = False
    """Lower the concurrency when more than this share of the attempts fails (True: 0.3), and raise it while fewer do,
    up to `concurrency`."""
    timeout_s: float | None = None
    """Most seconds of one attempt, on the clock of the event loop. Of a generator: from one item to the next."""
    deadline_s: float | None = None
    """Most seconds of a call with everything: waiting, attempts, and the time between them. Of a generator: to its
    last item."""
    retries: int = 0
    """Most attempts after a failed one."""
    retry_on: RetryOn = Exception
    """Which errors are retried: a class, a tuple of classes, or a function of the error (an `Exception`) that returns
    whether. An attempt that exceeds `timeout_s` is a `TimeoutError`."""
    interval_s: float = 0.5
    """Seconds from the first failure to the next attempt."""
    backoff: float = 2.0
    """Factor from one interval to the next. 1: always the same."""
    longest_interval_s: float = 20.0
    jitter: float = 1.0
    """Share of each interval that is random: 1 all of it (full jitter), 0 none."""
    seed: int | None = None
    """Seed of the jitter. None: drawn by the operating system."""
    default: Any = UNSET
    """What a failed call returns instead of raising: a value, or a function `default(error, *args, **kwargs)`. Not
    given: it raises. A call that was never made, because the function is closed or `key` raised, has no default."""
    hedge: bool | float = False
    """Start another attempt beside one that takes long, and take the first value. A number: after that many seconds.
    True: when a new attempt is likely to end sooner, by the latencies so far."""
    max_hedges: int = 1
    """Most hedges of a call. One that fails counts as a retry instead, as long as `retries` are left."""
    hedge_budget: float = 0.25
    """Most hedges, as a share of the calls of a batch or of those under way together; a few are always allowed."""
    breaker: bool | int = False
    """Refuse calls at once (`CircuitOpen`) after this many failures in a row (True: 5) of the errors in `retry_on`."""
    recovery_s: float = 30.0
    """Seconds after which the circuit lets one call through. If it succeeds, the circuit closes."""
    priority: Priority = "normal"
    """Calls of a higher priority start first: "high", "normal", "low" (10, 0, -10), or a whole number."""
    mode: Literal["auto", "thread", "process"] = "auto"
    """Where a sync function runs. `thread` (`auto`): in threads; a call that hangs goes on after its time-out.
    `process`: in worker processes; a call that hangs is killed."""
    size: Callable[..., float] | None = None
    """A function of the arguments that tells how long a call takes compared with others. `map` starts the longest
    first. None: the length of the texts among the arguments."""
    observers: Iterable[Observer] = ()
    """Called with each event (`AttemptStarted`, `AttemptEnded`, `CallEnded`, `SourceStateChanged`)."""
    debug: bool = False
    """Log every attempt and every call on the logger `qreward_plugins.accelerate`, at level DEBUG."""
    name: str | None = None
    """Its name in logs, events and errors. None: that of the function."""
    source: str | None = None
    """Take the declared limits of this source from `config`. Shared processes count its calls with those of engines."""
    config: str | PathLike[str] | Mapping[str, Any] | None = None
    """The configuration with `source`: the path of a YAML file, or a mapping."""
    shared: Shared = "off"
    """How several processes share the limits: `ray` within a Ray job; `machine` among the processes of one user on one
    machine; `auto`: `ray` if Ray is initialised, otherwise `machine` for a rate. `off`: each process has the whole
    limits."""

    def __post_init__(self) -> None:
        given: Any = self.observers
        object.__setattr__(self, "observers", tuple(given) if isinstance(given, Iterable) else given)
        mistakes = list(mistakes_of(self))
        if mistakes:
            raise ConfigurationError(mistakes, origin="accelerate")
        with_names(self.observers)  # raises for what is no observer

    @property
    def per_window(self) -> tuple[float, float] | None:
        """The rate as (calls, seconds); None if there is none."""
        return None if self.rate is None else rate_of(self.rate)

    @property
    def limits(self) -> Limits:
        """The limits as those of a source. Without `concurrency`, which depends on where the function runs."""
        found = self.per_window
        if found is None:
            return Limits()
        calls, window_s = found
        if self.window == "sliding":
            return Limits(requests_per_minute=60.0 * calls / window_s, window="sliding", window_s=window_s)
        burst = self.burst or max(1, math.ceil(BURST_S * calls / window_s))
        return Limits(requests_per_minute=60.0 * calls / window_s, window="bucket", burst=burst)

    @property
    def number(self) -> int:
        """The priority as a number."""
        return PRIORITIES[self.priority] if isinstance(self.priority, str) else self.priority

    def wait_s(self, failures: int, rng: random.Random) -> float:
        """Seconds from the n-th failure to the next attempt."""
        try:
            wait_s = min(self.interval_s * self.backoff ** (failures - 1), self.longest_interval_s)
        except OverflowError:
            wait_s = self.longest_interval_s
        return wait_s * (1.0 - self.jitter * rng.random()) if self.jitter else wait_s

    @property
    def failures_to_open(self) -> float:
        """Failures in a row that open the circuit; infinity: none."""
        if self.breaker is True:
            return FAILURES_TO_OPEN
        return math.inf if self.breaker is False else self.breaker

    @property
    def error_share(self) -> float | None:
        """The share of errors that lowers the concurrency; None: not adaptive."""
        if self.adaptive is True:
            return LEARNED_SHARE
        return None if self.adaptive is False else self.adaptive

    def retries_error(self, error: BaseException) -> bool:
        """Whether `retry_on` names this error. A predicate is asked about an `Exception` only. Raises what it raises,
        which means no.
        """
        if isinstance(self.retry_on, (type, tuple)):
            return isinstance(error, self.retry_on)
        return isinstance(error, Exception) and bool(self.retry_on(error))

    def changed(self, options: Mapping[str, Any]) -> Options:
        """These options with others instead of some. Raises `ConfigurationError`."""
        check_names(options)
        return replace(self, **options)


OF_THE_FUNCTION = frozenset(
    {
        "rate",
        "burst",
        "window",
        "key",
        "idle_s",
        "concurrency",
        "adaptive",
        "breaker",
        "recovery_s",
        "mode",
        "observers",
        "debug",
        "name",
        "source",
        "config",
        "shared",
        "seed",
    }
)
"""Options of the function as a whole. Those of a single call are the others."""
RETUNABLE = frozenset(["rate", "burst", "concurrency", "adaptive", "breaker", "recovery_s", "idle_s"])
"""Options of the function as a whole that may change while it runs."""


def options_of(given: Mapping[str, Any]) -> Options:
    """Return the options. Raises `ConfigurationError` for unknown names and impossible values."""
    check_names(given)
    return Options(**given)


def check_names(given: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` for unknown options."""
    names = [field.name for field in fields(Options)]
    mistakes = []
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            remedy = f"Did you mean {near[0]}?" if near else f"The options are {', '.join(names)}."
            mistakes.append(Mistake(one_line(str(name), 80), "unknown option.", remedy))
    if mistakes:
        raise ConfigurationError(mistakes, origin="accelerate")


class GivenOptions(TypedDict, total=False):
    """The options as keyword arguments, for type checkers; see `Options`."""

    rate: str | float | None
    burst: int | None
    window: Literal["pace", "sliding"]
    key: Callable[..., object] | None
    idle_s: float
    concurrency: int | None
    adaptive: bool | float
    timeout_s: float | None
    deadline_s: float | None
    retries: int
    retry_on: RetryOn
    interval_s: float
    backoff: float
    longest_interval_s: float
    jitter: float
    seed: int | None
    default: Any
    hedge: bool | float
    max_hedges: int
    hedge_budget: float
    breaker: bool | int
    recovery_s: float
    priority: Priority
    mode: Literal["auto", "thread", "process"]
    size: Callable[..., float] | None
    observers: Iterable[Observer]
    debug: bool
    name: str | None
    source: str | None
    config: str | PathLike[str] | Mapping[str, Any] | None
    shared: Shared


def check_fit(options: Options, kind: str, name: str) -> None:
    """Raise `ConfigurationError` for options that do not suit what the function is."""
    mistakes = []
    generator = kind.endswith("generator")
    if generator and options.default is not UNSET:
        problem = f"does not go with a generator ({name}): some items may have been used already."
        mistakes.append(Mistake("default", problem, "Leave it out, and catch the error where you iterate."))
    if generator and options.hedge is not False:
        problem = f"does not go with a generator ({name}): two attempts would make two sequences."
        mistakes.append(Mistake("hedge", problem, "Leave it out."))
    if options.mode == "process" and kind != "sync":
        what = "a generator" if generator else "an async function"
        problem = f"process does not go with {what} ({name})."
        mistakes.append(Mistake("mode", problem, "It is for sync functions; leave it out."))
    if kind == "async" and options.mode == "thread":
        mistakes.append(Mistake("mode", f"thread does not go with an async function ({name}).", "Leave it out."))
    if mistakes:
        raise ConfigurationError(mistakes, origin="accelerate")
