"""Every wrong use is one clear error that names the option and the remedy; and what type checkers see."""

from __future__ import annotations

from pathlib import Path

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
    (grade, {"timeout_s": -1}, "timeout_s: must be greater than 0, not -1"),
    (grade, {"retries": 1.5}, "retries"),
    (grade, {"retry_on": (TimeoutError, int)}, "retry_on: must be an exception class"),
    (grade, {"breaker": "yes"}, "breaker: must be a valid integer"),
    (grade, {"priority": "urgent"}, "priority: must be `high`, `normal`, `low`, or a whole number"),
    (grade, {"key": grade}, "key: must be a plain function"),
    (grade, {"default": grade}, "default: must be a plain function, not an async one"),
    (grade, {"observers": print}, "observers: must be a valid tuple"),
    (grade, {"shared": "ray", "adaptive": 0.3}, "adaptive: does not go with shared"),
    (grade, {"timeout": 3}, "timeout: unknown option. Did you mean `timeout_s`?"),
    (grade, {"mode": "process"}, "mode: process is for sync functions, and grade is none"),
    (letters, {"default": 0}, r"default: does not go with a generator \(letters\)"),
    (lambda x: x, {"mode": "process"}, "mode: process needs a function that can be imported"),
    (3, {}, "function: 3 cannot be called. Options have names"),
    (classmethod(plain), {}, "function: a classmethod is no function. Decorate the function below it"),
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


@pytest.mark.parametrize("items", [("abc",), (3,), ()])
def test_map_of_what_is_no_list(items):
    with pytest.raises(TypeError):
        accelerate(plain).map(*items)


def test_type_checkers_know_all_options():
    names = set(Options.model_fields)
    assert names == set(GivenOptions.__annotations__)
    assert names > OF_A_CALL


# What type checkers see of an accelerated function


SOURCE = """
from collections.abc import Iterator

from typing_extensions import assert_type

from qreward_plugins import accelerate

@accelerate
async def bare(x: int, *, y: str = ".") -> float:
    return x + len(y)

@accelerate(rate="600/min", timeout_s=3, retry_on=(TimeoutError,), default=None, key=lambda x: x)
def with_options(x: int) -> list[str]:
    return [str(x)]

@accelerate
def items(n: int) -> Iterator[bytes]:
    yield bytes(n)

async def right() -> None:
    assert_type(await bare(1, y="."), float)
    assert_type(await bare.map([1]), list[float])
    assert_type(await bare.with_options(retries=2)(1), float)
    assert_type(with_options(1), list[str])
    assert_type(list(items(1)), list[bytes])

async def wrong() -> None:
    await bare("x")  # type: ignore[arg-type]
    with_options()  # type: ignore[call-arg]
    accelerate(timeout=3)  # type: ignore[call-overload]
    accelerate(hedge="soon")  # type: ignore[call-overload]
"""


def test_mypy_strict_sees_the_signature_of_the_function(monkeypatch, tmp_path):
    """The ignores in the source are checked, too: an unused one is an error under `strict`."""
    api = pytest.importorskip("mypy.api")
    monkeypatch.chdir(Path(__file__).parents[2])  # its configuration and cache
    (tmp_path / "typed.py").write_text(SOURCE)
    output, errors, status = api.run([str(tmp_path / "typed.py")])
    assert (status, errors) == (0, ""), output
