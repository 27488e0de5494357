"""Accelerated sync functions, methods, worker processes, pickling and forks, in real time; generators; every wrong use,
which is one clear error that names the option and the remedy; and what type checkers see.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest

from qreward_plugins import ConfigurationError, EngineError, FunctionTimeout, accelerate
from qreward_plugins.acceleration import Options
from qreward_plugins.acceleration.options import OF_A_CALL, GivenOptions
from qreward_plugins.errors import SampleFault

from ..kit import each_of, in_virtual_time


@pytest.fixture(scope="module")
def functions():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        module = importlib.import_module("accelerated_functions")
        yield module
        module.work.close()
        del sys.modules["accelerated_functions"]


def test_a_sync_function_blocks_and_keeps_its_context():
    variable = contextvars.ContextVar("variable", default=0)
    threads = set()

    @accelerate(retries=2, interval_s=0)
    def add(x, y=0):
        threads.add(threading.current_thread())
        return x + y + variable.get()

    variable.set(10)
    assert add(1, y=2) == 13
    assert add.map([1, 2], [3, 4]) == [14, 16]
    assert threading.current_thread() not in threads
    add.close()
    with pytest.raises(EngineError, match="closed"):
        add(1)


def test_a_sync_call_that_hangs_goes_on_after_its_time_out():
    release = threading.Event()

    @accelerate(timeout_s=0.05)
    def hang():
        release.wait(10)

    with pytest.raises(FunctionTimeout):
        hang()
    release.set()


def test_threads_share_the_limits_of_a_sync_function():
    running, peak, lock = 0, 0, threading.Lock()

    @accelerate(concurrency=2)
    def grade(x):
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    threads = [threading.Thread(target=grade.map, args=(range(5),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peak == 2


def test_a_call_in_the_thread_that_serves_it_is_an_error_and_no_deadlock():
    @accelerate(key=lambda x: outer(x))
    def outer(x):
        return x

    with pytest.raises(EngineError, match="in the thread that serves it"):
        outer(1)


def test_a_sync_generator():
    ended = []

    @accelerate
    def numbers(count):
        try:
            yield from range(count)
        finally:
            ended.append(count)

    assert list(numbers(3)) == [0, 1, 2]
    items = numbers(5)
    assert next(items) == 0
    items.close()
    assert ended == [3, 5]


def test_methods_of_all_kinds(functions):
    grader = functions.Grader(10)
    assert grader.grade(1) == 11
    assert grader.grade.map([1, 2]) == [11, 12]
    assert functions.Grader.of_class(1) == grader.of_class(1) == ("Grader", 1)
    assert grader.static(3) == functions.Grader.static(3) == 3


def test_worker_processes_are_killed_and_carry_exceptions(functions):
    work = functions.work
    pid = work.with_options(timeout_s=30)("")
    assert pid != os.getpid()
    with pytest.raises(KeyError, match="from the worker") as raised:
        # The time limit of `work` is short, for the call that hangs. A busy machine may take longer for any other.
        work.with_options(timeout_s=30)("raise")
    assert "raised in a worker process: KeyError" in raised.value.__notes__[0]
    with pytest.raises(FunctionTimeout):
        work("hang")
    assert pid not in work._calls.run._pool.pids
    with pytest.raises(SampleFault, match="exit status 3"):
        work.with_options(timeout_s=30)("die")


def test_functions_are_pickled_by_name(functions, monkeypatch):
    assert pickle.loads(pickle.dumps(functions.double)) is functions.double
    for unnamed in (functions.Grader(3).grade, functions.double.with_options(retries=5)):
        with pytest.raises(pickle.PicklingError, match="top level of a module"):
            cloudpickle.dumps(unnamed)
    # Another process has another main module.
    monkeypatch.setattr(sys.modules["__main__"], "double", functions.double, raising=False)
    monkeypatch.setattr(functions.double.__wrapped__, "__module__", "__main__")
    with pytest.raises(pickle.PicklingError, match="top level of a module"):
        pickle.dumps(functions.double)


FORKED = """
import os, signal
from qreward_plugins import EngineError, accelerate

@accelerate(concurrency=2, rate="100/s", breaker=5)
def double(x):
    return 2 * x

@accelerate
def numbers():
    yield from range(9)

def in_child(x):
    if os.fork():
        assert os.wait()[1] == 0
        return
    signal.alarm(40)
    try:
        print(double(x), flush=True)
    except EngineError as error:
        print("spawn" in str(error), flush=True)
    raise SystemExit  # and nothing is waited for that only the parent has

in_child(1)
print(double(2), flush=True)
in_child(3)
print(double(4), flush=True)
items = numbers()
next(items)
"""


def test_a_child_forked_after_the_first_call_is_told_so_and_the_interpreter_ends_quietly_without_closing():
    # From Python 3.12 on, a fork beside threads is a DeprecationWarning.
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr, done.returncode) == (["2", "4", "True", "8"], "", 0)


# Generators


@accelerate(timeout_s=5, retries=2, interval_s=0)
async def letters(text, log):
    log.append("begin")
    try:
        if len(log) == 1:
            raise ConnectionError
        for letter in text:
            await asyncio.sleep(1)
            log.append(letter)
            yield letter
        if text == "bad":
            raise ConnectionError("after the last item")
    finally:
        log.append("end")


@in_virtual_time
async def test_a_generator_is_retried_until_its_first_item_and_makes_no_item_ahead():
    log = []
    found = letters("abc", log)
    assert await anext(found) == "a"
    await asyncio.sleep(100)
    assert log == ["begin", "end", "begin", "a"]
    assert [item async for item in found] == ["b", "c"]
    log = ["x"]
    with pytest.raises(ConnectionError, match="after"):
        assert [item async for item in letters("bad", log)]
    assert log == ["x", "begin", "b", "a", "d", "end"]


@in_virtual_time
async def test_the_time_limit_of_a_generator_is_from_item_to_item():
    @accelerate(timeout_s=5)
    async def slow():
        yield 1
        await asyncio.sleep(4)
        yield 2
        await asyncio.sleep(6)
        yield 3

    items = slow()
    assert [await anext(items), await anext(items)] == [1, 2]
    with pytest.raises(TimeoutError):
        await anext(items)


# Wrong uses


async def grade(x):
    return x


async def endless(x):
    while True:
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
    (grade, {"retry": 3}, "retry: unknown option. Did you mean `retries`?"),
    (grade, {"hedge": -1}, "hedge: must be a valid boolean or must be greater than 0, not -1"),
    (grade, {"mode": "process"}, "mode: process is for sync functions, and grade is none"),
    (endless, {"default": 0}, r"default: does not go with a generator \(endless\)"),
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
