"""Finds what is wrong with the options of `accelerate`: single values, and options that do not go together."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..config.nodes import MOST_PRIORITY, PRIORITIES
from ..errors import Mistake
from ..secrets import one_line

if TYPE_CHECKING:
    from .options import Options

_UNITS_S = {"s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_RATE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*/\s*([a-z]+)\s*")


def rate_of(value: str | float) -> tuple[float, float]:
    """Return a rate as (calls, seconds). Raises `ValueError`."""
    if isinstance(value, str):
        match = _RATE.fullmatch(value.lower())
        if match is None or match[2] not in _UNITS_S:
            raise ValueError
        calls, window_s = float(match[1]), _UNITS_S[match[2]]
    else:
        if not _is_number(value):
            raise ValueError
        calls, window_s = float(value), 1.0
    if not (0 < calls < math.inf):
        raise ValueError
    return calls, window_s


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_rate(value: Any) -> bool:
    try:
        rate_of(value)
    except ValueError:
        return False
    return True


def _above_0(value: Any) -> bool:
    return _is_number(value) and value > 0


def _count_from(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_plain_function(value: Any) -> bool:
    return callable(value) and not inspect.iscoroutinefunction(value)


def _is_retry_on(value: Any) -> bool:
    if isinstance(value, type):
        return issubclass(value, BaseException)
    if isinstance(value, tuple):
        return all(isinstance(each, type) and issubclass(each, BaseException) for each in value)
    return _is_plain_function(value)


def _or(other: object, fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is other or fits(value)


def _switch_or(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, bool) or fits(value)


def _one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in words


_WINDOWS, _MODES, _SHARED = ("pace", "sliding"), ("auto", "thread", "process"), ("off", "auto", "ray", "machine")
_CHECKS: Sequence[tuple[str, Callable[[Any], bool], str]] = (
    (
        "rate",
        _or(None, _is_rate),
        'Write it as "600/min", "10/s", "5000/hour", or as a number of calls a second above 0.',
    ),
    ("timeout_s deadline_s", _or(None, _above_0), "It is a number of seconds above 0, or None for no limit."),
    (
        "interval_s longest_interval_s",
        lambda value: _is_number(value) and value >= 0,
        "It is a number of seconds, at least 0.",
    ),
    ("idle_s recovery_s", _above_0, "It is a number of seconds above 0."),
    ("burst concurrency", _or(None, _count_from(1)), "It is a whole number from 1 on, or None."),
    ("retries", _count_from(0), "It is a whole number from 0 on."),
    ("max_hedges", _count_from(1), "It is a whole number from 1 on."),
    ("backoff", lambda value: _is_number(value) and value >= 1, "It is a factor, at least 1."),
    ("jitter hedge_budget", lambda value: _is_number(value) and 0 <= value <= 1, "It is a share from 0 to 1."),
    ("hedge", _switch_or(_above_0), "It is True, False, or a number of seconds above 0."),
    ("breaker", _switch_or(_count_from(1)), "It is True, False, or a number of failures from 1 on."),
    (
        "adaptive",
        _switch_or(lambda value: _above_0(value) and value < 1),
        "It is True, False, or a share of errors between 0 and 1.",
    ),
    ("seed", _or(None, _count_from(-(2**63))), "It is a whole number, or None."),
    ("debug", lambda value: isinstance(value, bool), "It is True or False."),
    ("name", _or(None, lambda value: isinstance(value, str) and bool(value.strip())), "It is a text, or None."),
    (
        "priority",
        lambda value: _count_from(-MOST_PRIORITY)(value) or _one_of(*PRIORITIES)(value),
        'It is "high", "normal", "low", or a whole number; higher goes first.',
    ),
    ("window", _one_of(*_WINDOWS), f"It is one of {', '.join(_WINDOWS)}."),
    ("mode", _one_of(*_MODES), f"It is one of {', '.join(_MODES)}."),
    ("shared", _one_of(*_SHARED), f"It is one of {', '.join(_SHARED)}."),
    ("key size", _or(None, _is_plain_function), "It is a plain function of the arguments, or None."),
    (
        "default",
        lambda value: not (inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value)),
        "A function that makes a default must not be async.",
    ),
    ("retry_on", _is_retry_on, "It is an exception class, a tuple of them, or a plain function of the error."),
    ("observers", lambda value: isinstance(value, tuple), "It is a list; put a single observer into one."),
)
"""The names of options, what their values must be, and how to write them."""


def mistakes_of(options: Any) -> Iterable[Mistake]:
    """Find what is wrong with single options, then with those that do not go together."""
    for names, fits, words in _CHECKS:
        for name in names.split():
            if not fits(value := getattr(options, name)):
                yield Mistake(name, f"{one_line(repr(value), 100)} is not possible.", words)
    yield from _conflicts(options)


def _conflicts(options: Options) -> Iterable[Mistake]:
    if (options.source is None) != (options.config is None):
        given, missing = ("source", "config") if options.config is None else ("config", "source")
        yield Mistake(given, f"is given without {missing}.", f"Give both, so that {given} is found, or neither.")
    if options.source is not None and options.rate is not None:
        yield Mistake("rate", "is given beside source.", "The source declares the limits; leave rate out.")
    if options.burst is not None and (options.rate is None or options.window == "sliding"):
        yield Mistake("burst", "needs a rate with window='pace'.", "Give a rate, or leave burst out.")
    if options.shared != "off" and options.adaptive is not False:
        yield Mistake(
            "adaptive", "does not go with shared.", "A learned concurrency is each process's own; leave one out."
        )
