"""Accelerated sync functions, methods, worker processes, pickling and forks, in real time."""

from __future__ import annotations

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

from qreward_plugins import EngineError, FunctionTimeout, accelerate
from qreward_plugins.errors import SampleFault


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
