"""Finds what is wrong with the options of `accelerate`: single values, and options that do not go together."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..config.nodes import PRIORITIES
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


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def mistakes_of(options: Any) -> Iterable[Mistake]:
    """Find what is wrong with single options, then with those that do not go together."""

    def wrong(name: str, remedy: str) -> Mistake:
        return Mistake(name, f"{one_line(repr(getattr(options, name)), 100)} is not possible.", remedy)

    if options.rate is not None:
        try:
            rate_of(options.rate)
        except ValueError:
            yield wrong("rate", 'Write it as "600/min", "10/s", "5000/hour", or as a number of calls a second above 0.')
    for name in ("timeout_s", "deadline_s"):
        value = getattr(options, name)
        if value is not None and not (_is_number(value) and value > 0):
            yield wrong(name, "It is a number of seconds above 0, or None for no limit.")
    for name in ("interval_s", "longest_interval_s"):
        if not (_is_number(getattr(options, name)) and getattr(options, name) >= 0):
            yield wrong(name, "It is a number of seconds, at least 0.")
    for name in ("idle_s", "recovery_s"):
        if not (_is_number(getattr(options, name)) and getattr(options, name) > 0):
            yield wrong(name, "It is a number of seconds above 0.")
    for name, least in (("burst", 1), ("concurrency", 1)):
        value = getattr(options, name)
        if value is not None and not _is_count(value, least):
            yield wrong(name, f"It is a whole number from {least} on, or None.")
    for name in ("retries", "max_hedges"):
        if not _is_count(getattr(options, name), 0 if name == "retries" else 1):
            yield wrong(name, f"It is a whole number from {0 if name == 'retries' else 1} on.")
    if not (_is_number(options.backoff) and options.backoff >= 1):
        yield wrong("backoff", "It is a factor, at least 1.")
    for name in ("jitter", "hedge_budget"):
        if not (_is_number(getattr(options, name)) and 0 <= getattr(options, name) <= 1):
            yield wrong(name, "It is a share from 0 to 1.")
    if not isinstance(options.hedge, bool) and not (_is_number(options.hedge) and options.hedge > 0):
        yield wrong("hedge", "It is True, False, or a number of seconds above 0.")
    if not isinstance(options.breaker, bool) and not _is_count(options.breaker, 1):
        yield wrong("breaker", "It is True, False, or a number of failures from 1 on.")
    if not isinstance(options.adaptive, bool) and not (_is_number(options.adaptive) and 0 < options.adaptive < 1):
        yield wrong("adaptive", "It is True, False, or a share of errors between 0 and 1.")
    if options.seed is not None and not _is_count(options.seed, -(2**63)):
        yield wrong("seed", "It is a whole number, or None.")
    if not isinstance(options.debug, bool):
        yield wrong("debug", "It is True or False.")
    if options.name is not None and not (isinstance(options.name, str) and options.name.strip()):
        yield wrong("name", "It is a text, or None.")
    if isinstance(options.priority, bool) or not (
        isinstance(options.priority, int) or options.priority in tuple(PRIORITIES)
    ):
        yield wrong("priority", 'It is "high", "normal", "low", or a whole number; higher goes first.')
    for name, words in (
        ("window", ("pace", "sliding")),
        ("mode", ("auto", "thread", "process")),
        ("shared", ("off", "auto", "ray", "machine")),
    ):
        if not isinstance(getattr(options, name), str) or getattr(options, name) not in words:
            yield wrong(name, f"It is one of {', '.join(words)}.")
    for name in ("key", "size"):
        value = getattr(options, name)
        if value is not None and (not callable(value) or inspect.iscoroutinefunction(value)):
            yield wrong(name, "It is a plain function of the arguments, or None.")
    if inspect.iscoroutinefunction(options.default) or inspect.isasyncgenfunction(options.default):
        yield wrong("default", "A function that makes a default must not be async.")
    if not _is_retry_on(options.retry_on):
        yield wrong("retry_on", "It is an exception class, a tuple of them, or a plain function of the error.")
    if not isinstance(options.observers, tuple):
        yield wrong("observers", "It is a list; put a single observer into one.")
    yield from _conflicts(options)


def _is_retry_on(value: Any) -> bool:
    if isinstance(value, type):
        return issubclass(value, BaseException)
    if isinstance(value, tuple):
        return all(isinstance(each, type) and issubclass(each, BaseException) for each in value)
    return callable(value) and not inspect.iscoroutinefunction(value)


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
