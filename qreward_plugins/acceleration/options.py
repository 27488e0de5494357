"""The options of `accelerate`: their units, their defaults, and what their values may be."""

from __future__ import annotations

import inspect
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from ..config import Limits
from ..config.findings import did_you_mean
from ..config.nodes import Integer, Node, NonNegativeFloat, PositiveFloat, PositiveInt, Priority
from ..errors import ConfigurationError, Mistake
from ..observers import Observer, with_names
from ..secrets import one_line

UNSET = inspect.Parameter.empty
"""Marks an option that was not given, where None is a value."""

Shared: TypeAlias = Literal["off", "auto", "ray", "machine"]
Kind: TypeAlias = Literal["async", "sync", "async_generator", "generator"]
"""What a function is."""

_MOST_DOUBLINGS = 100
BURST_S = 0.05
"""Seconds' worth of the rate that paced calls may start at once."""

_UNITS_S = {"s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_RATE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*/\s*([a-z]+)\s*")


def rate_of(value: Any) -> tuple[float, float]:
    """Return a rate as (calls, seconds). Raises `ValueError`."""
    match = _RATE.fullmatch(value.lower()) if isinstance(value, str) else None
    if match is not None and match[2] in _UNITS_S and float(match[1]) > 0:
        return float(match[1]), _UNITS_S[match[2]]
    if type(value) in (int, float) and 0 < value < math.inf:
        return float(value), 1.0
    raise ValueError('must be written as "600/min", "10/s", "5000/hour", or as a number of calls a second above 0')


def _is_rate(value: Any) -> Any:
    if value is not None:
        rate_of(value)
    return value


def _is_retry_on(value: Any) -> Any:
    classes = value if isinstance(value, tuple) else (value,)
    if all(isinstance(each, type) and issubclass(each, BaseException) for each in classes):
        return value
    if isinstance(value, (type, tuple)) or not callable(value):
        raise ValueError("must be an exception class, a tuple of them, or a plain function of the error")
    return _is_plain(value)


def _is_plain(value: Any) -> Any:
    if inspect.iscoroutinefunction(value):
        raise ValueError("must be a plain function, not an async one")
    return value


_Seconds = PositiveFloat | None
_Count = Annotated[Integer, Field(ge=0)]
_Share = Annotated[NonNegativeFloat, Field(le=1)]


class Options(Node):
    """The options of one accelerated function. Times are seconds. `docs/functions.md` has a table of them."""

    model_config = ConfigDict(strict=True)

    rate: Annotated[Any, AfterValidator(_is_rate)] = None
    """Most calls in a time: "600/min", "10/s", "5000/hour", or a number of calls a second. Retries and hedges count.
    None: no limit."""
    window: Literal["pace", "sliding"] = "pace"
    """`pace`: calls start evenly spread. `sliding`: in any time of the unit of `rate` (a minute for "600/min") at most
    that many, all of them at once if they come at once."""
    key: Annotated[Callable[..., object] | None, AfterValidator(_is_plain)] = None
    """A function of the arguments. Calls with equal results share rate, concurrency and breaker; others have their own.
    For a method it gets the arguments without `self`. With `shared` it returns texts; otherwise, a key is forgotten
    after ten minutes without a call. None: all calls share them."""
    concurrency: PositiveInt | None = None
    """Most calls at once. None: any number of an async function; 32 threads; as many processes as there are processors.
    """
    adaptive: Annotated[PositiveFloat, Field(lt=1)] | None = None
    """Lower the concurrency when more than this share of the attempts fails, such as 0.3, and raise it while fewer do,
    up to `concurrency`. None: the concurrency is fixed."""
    timeout_s: _Seconds = None
    """Most seconds of one attempt, on the clock of the event loop. Of a generator: from one item to the next."""
    deadline_s: _Seconds = None
    """Most seconds of a call with everything: waiting, attempts, and the time between them. Of a generator: to its
    last item."""
    retries: _Count = 0
    """Most attempts after a failed one."""
    retry_on: Annotated[Any, AfterValidator(_is_retry_on)] = Exception
    """Which errors are retried: a class, a tuple of classes, or a function of the error (an `Exception`) that returns
    whether. An attempt that exceeds `timeout_s` is a `TimeoutError`."""
    interval_s: NonNegativeFloat = 0.5
    """Seconds from the first failure to the next attempt."""
    backoff: Annotated[float, Field(ge=1, le=100)] = 2.0
    """Factor from one interval to the next. 1: always the same."""
    longest_interval_s: NonNegativeFloat = 20.0
    jitter: _Share = 1.0
    """Share of each interval that is random: 1 all of it (full jitter), 0 none."""
    seed: Integer | None = None
    """Seed of the jitter. None: drawn by the operating system."""
    default: Annotated[Any, AfterValidator(_is_plain)] = UNSET
    """What a failed call returns instead of raising: a value, or a function `default(error, *args, **kwargs)`. Not
    given: it raises. A call that was never made, because the function is closed or `key` raised, has no default."""
    hedge: bool | PositiveFloat = False
    """Start another attempt beside one that takes long, and take the first value. A number: after that many seconds.
    True: when a new attempt is likely to end sooner, by the latencies so far. A call has one hedge; one that fails
    counts as a retry instead, as long as `retries` are left."""
    hedge_budget: _Share = 0.25
    """Most hedges, as a share of the calls of a batch or of those under way together; a few are always allowed."""
    breaker: PositiveInt | None = None
    """Refuse calls at once (`CircuitOpen`) after this many failures in a row of the errors in `retry_on`. None: never.
    """
    recovery_s: PositiveFloat = 30.0
    """Seconds after which the circuit lets one call through. If it succeeds, the circuit closes."""
    priority: Priority = 0
    """Calls of a higher priority start first: "high", "normal", "low" (10, 0, -10), or a whole number."""
    mode: Literal["thread", "process"] = "thread"
    """Where a sync function runs. `thread`: in threads; a call that hangs goes on after its time-out. `process`: in
    worker processes; a call that hangs is killed."""
    observers: Annotated[tuple[Any, ...], Field(strict=False)] = ()
    """Called with each event (`AttemptStarted`, `AttemptEnded`, `CallEnded`). Any iterable."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Its name in logs, events and errors. None: that of the function."""
    shared: Shared = "off"
    """How several processes share the limits: `ray` within a Ray job; `machine` among the processes of one user on one
    machine; `auto`: `ray` if Ray is initialised, otherwise `machine` for a rate. `off`: each process has the whole
    limits."""

    @property
    def limits(self) -> Limits:
        """The declared limits as those of a source."""
        if self.rate is None:
            return Limits(concurrency=self.concurrency)
        calls, window_s = rate_of(self.rate)
        burst = max(1, math.ceil(BURST_S * calls / window_s))
        strict = {"window": "sliding", "window_s": window_s}
        spread = {"window": "bucket", "burst": burst}
        how: Any = strict if self.window == "sliding" else spread
        return Limits(requests_per_minute=60.0 * calls / window_s, concurrency=self.concurrency, **how)

    def wait_s(self, failures: int, rng: random.Random) -> float:
        """Seconds from the n-th failure to the next attempt."""
        wait_s = min(self.interval_s * self.backoff ** min(failures - 1, _MOST_DOUBLINGS), self.longest_interval_s)
        return wait_s * (1.0 - self.jitter * rng.random()) if self.jitter else wait_s

    def retries_error(self, error: BaseException) -> bool:
        """Whether `retry_on` names this error. A predicate is asked about an `Exception` only. Raises what it raises,
        which means no.
        """
        if isinstance(self.retry_on, (type, tuple)):
            return isinstance(error, self.retry_on)
        return isinstance(error, Exception) and bool(self.retry_on(error))


_OF_RETRIES = ("retries", "retry_on", "interval_s", "backoff", "longest_interval_s", "jitter")
OF_A_CALL = frozenset(("timeout_s", "deadline_s", *_OF_RETRIES, "default", "hedge", "hedge_budget", "priority"))
"""Options of a single call, which may differ from call to call. The others are those of the function as a whole."""


def options_of(given: Mapping[str, Any], kind: Kind | None = None, name: str = "") -> Options:
    """Return the options. Raises `ConfigurationError` with all mistakes: unknown names, impossible values, and what
    does not go with a function of this kind. The `name` of the function is for messages.
    """
    try:
        options = Options(**given)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
        names = dict.fromkeys(str(each["loc"][0]) for each in errors)
        mistakes = [_mistake(name, [each for each in errors if each["loc"][0] == name]) for name in names]
        raise ConfigurationError(mistakes, origin="accelerate") from None
    with_names(options.observers)  # raises for what is no observer
    mistakes = list(_misfits(options, kind, name))
    if mistakes:
        raise ConfigurationError(mistakes, origin="accelerate")
    return options


def _mistake(name: str, errors: Sequence[ErrorDetails]) -> Mistake:
    """The mistake in an option; of a union, each member has an error."""
    if errors[0]["type"] == "extra_forbidden":
        near = did_you_mean("retries" if name == "retry" else name, Options.model_fields)
        return Mistake(name, "unknown option.", f"{near}The options are {', '.join(Options.model_fields)}.")
    problems = [each["msg"].removeprefix("Value error, ").replace("Input should", "must", 1) for each in errors]
    return Mistake(name, f"{' or '.join(problems)}, not {one_line(repr(errors[0]['input']), 100)}.")


def _misfits(options: Options, kind: Kind | None, name: str) -> Iterator[Mistake]:
    """What does not go together, or with what the function is."""
    if options.shared != "off" and options.adaptive is not None:
        problem = "does not go with shared: a learned concurrency is each process's own."
        yield Mistake("adaptive", problem, "Leave one out.")
    if kind in ("generator", "async_generator"):
        if options.default is not UNSET:
            problem = f"does not go with a generator ({name}): some items may have been used already."
            yield Mistake("default", problem, "Catch the error where you iterate.")
        if options.hedge is not False:
            yield Mistake("hedge", f"does not go with a generator ({name}): two attempts would make two sequences.")
    if kind is not None and options.mode == "process" and kind != "sync":
        yield Mistake("mode", f"process is for sync functions, and {name} is none.", "Leave it out.")


class GivenOptions(TypedDict, total=False):
    """The options as keyword arguments, for type checkers. `Options` describes them."""

    rate: str | float | None
    window: Literal["pace", "sliding"]
    key: Callable[..., object] | None
    concurrency: int | None
    adaptive: float | None
    timeout_s: float | None
    deadline_s: float | None
    retries: int
    retry_on: type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], object]
    interval_s: float
    backoff: float
    longest_interval_s: float
    jitter: float
    seed: int | None
    default: Any
    hedge: bool | float
    hedge_budget: float
    breaker: int | None
    recovery_s: float
    priority: Literal["high", "normal", "low"] | int
    mode: Literal["thread", "process"]
    observers: Iterable[Observer]
    name: str | None
    shared: Shared
