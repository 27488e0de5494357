"""Every wrong use is one clear error that names the option and the remedy."""

from __future__ import annotations

import re

import pytest

from qreward_plugins import ConfigurationError, accelerate
from qreward_plugins.acceleration import Options
from qreward_plugins.acceleration.options import OF_A_CALL, GivenOptions

from ..kit import each_of


async def grade(x):
    return x


async def letters(x):
    yield x


def plain(x):
    return x


WRONG = [
    (grade, {"rate": "fast"}, r'rate: must be written as "600/min", .*, not \'fast\''),
    (grade, {"rate": "600/fortnight"}, "rate"),
    (grade, {"timeout_s": -1}, "timeout_s: must be a number of seconds above 0, or None for no limit, not -1"),
    (grade, {"deadline_s": float("inf")}, "deadline_s"),
    (grade, {"retries": 1.5}, "retries"),
    (grade, {"retry_on": (TimeoutError, int)}, "retry_on"),
    (grade, {"hedge": 0.0}, "hedge"),
    (grade, {"breaker": "yes"}, "breaker: must be True, False, or a number of failures"),
    (grade, {"adaptive": 1.0}, "adaptive"),
    (grade, {"priority": "urgent"}, "priority: must be `high`, `normal`, `low`, or a whole number"),
    (grade, {"key": grade}, "key: must be a plain function"),
    (grade, {"default": grade}, "default: must be a value, or a function that is not async"),
    (grade, {"observers": print}, "observers: must be a list; put a single observer into one"),
    (grade, {"observers": [3]}, r"observers\[0\]"),
    (grade, {"shared": "ray", "adaptive": True}, "adaptive: does not go with shared"),
    (grade, {"timeout": 3}, "timeout: unknown option. Did you mean `timeout_s`?"),
    (grade, {"zzz": 3}, "zzz: unknown option. The options are rate"),
    (grade, {"mode": "process"}, r"mode: process does not go with an async function \(grade\)"),
    (letters, {"default": 0}, r"default: does not go with a generator \(letters\)"),
    (lambda x: x, {"mode": "process"}, "mode: process needs a function that can be imported"),
    (3, {}, "function: 3 cannot be called. Options have names"),
    (property(plain), {}, "function: a property is no function"),
    (accelerate(grade), {}, "is accelerated already. Use with_options"),
]


@each_of(("function", "options", "message"), WRONG)
def test_wrong_use(function, options, message):
    with pytest.raises(ConfigurationError, match=message) as raised:
        accelerate(**options)(function)
    assert len(raised.value.mistakes) == 1


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigurationError) as raised:
        accelerate(timeout_s=0, retries=-1, rate="x")(grade)
    assert [mistake.path for mistake in raised.value.mistakes] == ["rate", "timeout_s", "retries"]


def test_options_of_the_function_cannot_differ_from_call_to_call():
    with pytest.raises(
        ConfigurationError, match=r"rate: belongs to the function as a whole. Decorate the function again"
    ):
        accelerate(grade).with_options(rate="1/s")


@each_of(
    ("items", "message"),
    [
        (("abc",), "TypeError: .*iterables"),
        ((3,), "TypeError: .*iterables"),
        ((), "TypeError: .*at least one"),
        (([1, 2], [3]), "ValueError: .*different lengths: 2, 1"),
    ],
)
def test_map_of_what_is_no_list(items, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        accelerate(plain).map(*items)
    assert re.match(message, f"{type(raised.value).__name__}: {raised.value}")


def test_type_checkers_know_all_options():
    names = set(Options.model_fields)
    assert names == set(GivenOptions.__annotations__)
    assert names > OF_A_CALL
