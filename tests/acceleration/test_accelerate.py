"""Accelerated async functions, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random

import pytest

from qreward_plugins import accelerate
from qreward_plugins.errors import CircuitOpen, EngineError, FunctionTimeout, Throttled
from qreward_plugins.simulation import run

from ..kit import each_of, in_virtual_time, now


class Calls:
    """A function whose n-th call does what the n-th behaviour says: seconds to sleep, or an error to raise."""

    def __init__(self, *behaviours, then=0.0):
        self.behaviours = list(behaviours)
        self.then = then
        self.starts = []
        self.cancelled = 0

    async def __call__(self, *args, **kwargs):
        self.starts.append(now())
        number = len(self.starts)
        behaviour = self.behaviours.pop(0) if self.behaviours else self.then
        try:
            if isinstance(behaviour, BaseException):
                raise behaviour
            await asyncio.sleep(behaviour)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return args[0] if args else number


def accelerated(calls, **options):
    return accelerate(calls, name="grade", **options)


# One call


def test_a_bare_function_is_called_once_and_keeps_its_name():
    @accelerate
    async def add(x, *, y=1):
        """Adds."""
        return x + y

    assert run(add(1, y=2)) == 3
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert asyncio.iscoroutinefunction(add)
    assert add.statistics().attempts == 1


GROWING = {"retries": 3, "interval_s": 1, "backoff": 3, "jitter": 0}


@each_of(
    ("behaviours", "options", "starts", "cancelled"),
    [
        ([ConnectionError()], GROWING, [0.0, 1.0], 0),
        ([ConnectionError()] * 3, GROWING, [0.0, 1.0, 4.0, 13.0], 0),
        ([100.0], {"timeout_s": 5, "retries": 1, "interval_s": 1, "jitter": 0}, [0.0, 6.0], 1),
        ([100.0], {"hedge": 2.0, "timeout_s": 20}, [0.0, 2.0], 1),
        # A hedge takes no retry.
        ([100.0] * 2, {"hedge": 2.0, "timeout_s": 5, "retries": 1, "interval_s": 1, "jitter": 0}, [0.0, 2.0, 8.0], 2),
    ],
)
def test_failed_and_slow_attempts_are_followed_by_others(behaviours, options, starts, cancelled):
    calls = Calls(*behaviours, then=1.0)
    assert run(accelerated(calls, **options)("x")) == "x"
    assert (calls.starts, calls.cancelled) == (starts, cancelled)


def test_the_original_error_is_raised_with_a_note_on_the_attempts():
    calls = Calls(ConnectionError("first"), ValueError("last"))
    with pytest.raises(ValueError, match="last") as raised:
        run(accelerated(calls, retries=1, interval_s=1, jitter=0)("x"))
    assert raised.value.__notes__ == ["accelerate: 2 attempts failed in 1 s; before this one: ConnectionError: first"]


@pytest.mark.parametrize(
    "retry_on", [ConnectionError, (KeyError, ConnectionError), lambda error: "again" in str(error)]
)
def test_only_the_named_errors_are_retried(retry_on):
    calls = Calls(ConnectionError("again"), ValueError("no"))

    with pytest.raises(ValueError, match="no"):
        run(accelerated(calls, retries=5, retry_on=retry_on)("x"))
    assert len(calls.starts) == 2


@each_of(
    ("behaviours", "options", "error", "at"),
    [
        ([100.0], {"deadline_s": 7}, FunctionTimeout, 7.0),
        ([100.0] * 3, {"deadline_s": 7, "timeout_s": 3, "retries": 9, "interval_s": 0}, FunctionTimeout, 7.0),
        # A retry that would come later is not waited for.
        ([ConnectionError()], {"deadline_s": 5, "retries": 3, "interval_s": 9, "jitter": 0}, ConnectionError, 0.0),
    ],
)
@in_virtual_time
async def test_the_deadline_ends_a_call_whatever_it_waits_for(behaviours, options, error, at):
    with pytest.raises(error):
        await accelerated(Calls(*behaviours), **options)("x")
    assert now() == pytest.approx(at)


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({}, 3),
        ({"retries": 3, "interval_s": 9, "jitter": 0}, 4),
        ({"retries": 3, "interval_s": 0}, 6),
        ({"retries": 3, "interval_s": 0, "concurrency": 1}, 4),
    ],
)
@in_virtual_time
async def test_a_function_that_swallows_its_cancellation_does_not_hold_its_call(options, at):
    async def stubborn():
        for _ in range(99):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)

    grade = accelerate(stubborn, timeout_s=3, **options)
    with pytest.raises(FunctionTimeout):
        await asyncio.wait_for(grade(), 60)
    assert now() == pytest.approx(at)
    await grade.aclose()


@pytest.mark.parametrize("default", [None, 0.5, lambda error, text, **_: (type(error).__name__, text)])
@in_virtual_time
async def test_the_default_stands_in_for_any_failure(default):
    grade = accelerated(Calls(KeyError("a"), then=100.0), timeout_s=1, default=default)
    for name in ("KeyError", "FunctionTimeout"):
        assert await grade("x") == ((name, "x") if callable(default) else default)
    assert grade.statistics().failed == {"failed": 2}


@in_virtual_time
async def test_cancelling_a_call_cancels_its_attempt_and_waits_for_it():
    ended = []

    @accelerate(default=0.0)
    async def grade():
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.5)
            ended.append(now())

    call = asyncio.create_task(grade())
    await asyncio.sleep(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended == [1.5]
    assert grade.statistics().failed == {"cancelled": 1}
    assert grade.statistics().in_flight == 0


# Hedges, breaker, adaptive concurrency


@in_virtual_time
async def test_a_learned_hedge_replaces_stragglers_and_little_else():
    rng = random.Random(5)
    calls = Calls(*(60.0 if number % 40 == 39 else rng.uniform(0.8, 1.2) for number in range(400)), then=1.0)
    grade = accelerated(calls, hedge=True, rate="20/s", seed=1)
    await grade.map(range(400))
    assert now() < 40
    assert 9 <= grade.statistics().hedges <= 40


@in_virtual_time
async def test_the_circuit_opens_at_its_threshold_and_closes_after_one_success():
    calls = Calls(*(ConnectionError() for _ in range(4)))
    grade = accelerated(calls, breaker=3, recovery_s=10)
    for _ in range(3):
        with pytest.raises(ConnectionError):
            await grade("x")
    for wait_s in (0, 9.9):
        await asyncio.sleep(wait_s)
        with pytest.raises(CircuitOpen, match="circuit of grade is open"):
            await grade("x")
    await asyncio.sleep(0.2)
    with pytest.raises(ConnectionError):  # the probe
        await grade("x")
    with pytest.raises(CircuitOpen):
        await grade("x")
    await asyncio.sleep(10.1)
    assert await grade("x") == "x"
    assert await grade.map(["a", "b"]) == ["a", "b"]
    assert len(calls.starts) == 7


@in_virtual_time
async def test_errors_that_a_retry_does_not_help_open_no_circuit():
    grade = accelerated(Calls(*(ValueError("no") for _ in range(3))), breaker=2, retry_on=ConnectionError)
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            await grade("x")
    assert await grade("x") == "x"


@in_virtual_time
async def test_a_system_exit_belongs_to_the_caller_and_does_not_end_the_event_loop():
    with pytest.raises(SystemExit):
        await accelerated(Calls(SystemExit(3)))("x")
    await asyncio.sleep(1)


@in_virtual_time
async def test_an_open_circuit_refuses_at_once_also_what_waits_for_its_rate():
    grade = accelerated(Calls(ConnectionError()), breaker=1, rate="1/min")
    with pytest.raises(ConnectionError):
        await grade("x")
    with pytest.raises(CircuitOpen):
        await grade("x")
    assert now() == 0.0


@in_virtual_time
async def test_hedges_are_a_share_of_the_calls_under_way():
    grade = accelerated(Calls(then=5.0), hedge=1.0)
    for _ in range(2):
        await grade.map(range(8))
    assert grade.statistics().hedges == 8


@in_virtual_time
async def test_adaptive_concurrency_falls_with_errors_and_rises_without():
    bad = True

    @accelerate(adaptive=0.3, concurrency=64, retries=20, interval_s=0.1)
    async def grade(x):
        await asyncio.sleep(1)
        if bad and random.Random(x).random() < 0.9:
            raise ConnectionError
        return x

    first = asyncio.create_task(grade.map(range(300)))
    await asyncio.sleep(20)
    low = grade.statistics().concurrency
    bad = False
    await first
    await grade.map(range(2000))
    assert low <= 8 < 32 <= grade.statistics().concurrency <= 64


@in_virtual_time
async def test_a_throttled_function_pauses_all_calls():
    calls = Calls(Throttled("slow down", retry_after_s=5))
    grade = accelerated(calls, retries=1, interval_s=0)
    first = asyncio.ensure_future(grade("a"))
    await asyncio.sleep(1)
    await asyncio.gather(first, grade("b"))
    assert calls.starts[0] == 0.0
    assert min(calls.starts[1:]) >= 5.0


# Limits


@in_virtual_time
async def test_each_key_has_a_rate_of_its_own():
    grade = accelerated(Calls(), rate="1/s", key=lambda user: user)
    await grade.map(["a", "b"] * 3)
    assert now() == pytest.approx(2.0, abs=1e-3)
    assert grade.statistics().keys == 2


@in_virtual_time
async def test_idle_keys_are_forgotten_but_their_limits_are_not():
    calls = Calls()
    grade = accelerated(calls, rate="20/hour", window="sliding", key=lambda user: user)
    await grade.map([0] * 20)
    await asyncio.sleep(1000)
    await grade.map(range(1, 100))
    await grade(0)
    assert calls.starts[-1] >= 3600.0
    for _ in range(50):
        await asyncio.sleep(2000)
        await grade("x")
    assert grade.statistics().keys <= 10


@in_virtual_time
async def test_higher_priorities_go_first():
    calls = Calls(then=1.0)
    order = []

    async def one(grade, name):
        await grade(name)
        order.append(name)

    grade = accelerated(calls, concurrency=1)
    names = ["low", "normal", "high", "low", "high"]
    await asyncio.gather(*(one(grade.with_options(priority=name), name) for name in names))
    assert order == ["high", "high", "normal", "low", "low"]


# Batches and streams


@in_virtual_time
async def test_map_keeps_order_and_starts_the_longest_first():
    starts = []

    @accelerate(concurrency=2)
    async def grade(text, extra, *, factor):
        starts.append(text)
        await asyncio.sleep(len(text))
        return (text, extra, factor)

    texts = ["a", "aaaa", "aa", "aaa"]
    assert await grade.map(texts, range(4), factor=2) == [(text, n, 2) for n, text in enumerate(texts)]
    assert starts == ["aaaa", "aaa", "aa", "a"]
    assert now() == 5.0
    assert await grade.map([], []) == []


@in_virtual_time
async def test_the_first_error_of_map_cancels_the_others():
    calls = Calls(100.0, ValueError("one"), 100.0)
    grade = accelerated(calls)
    with pytest.raises(ValueError, match="one"):
        await grade.map(["a", "b", "c"])
    assert now() == 0.0
    assert grade.statistics().under_way == 0
    assert grade.statistics().in_flight == 0


# Views, observers, loops


def test_one_loop_after_the_other_but_not_two_at_once():
    grade = accelerated(Calls(), rate="1/s")
    assert [run(grade(number)) for number in range(3)] == [0, 1, 2]

    async def outer():
        await grade("x")
        with pytest.raises(EngineError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(grade("y")))

    asyncio.run(outer())


@in_virtual_time
async def test_a_closed_function_says_so_and_fails_what_waits():
    grade = accelerated(Calls(then=100.0), default=0)
    call = asyncio.create_task(grade("x"))
    await asyncio.sleep(1)
    await grade.aclose()
    await grade.aclose()
    with pytest.raises(EngineError, match="closed"):
        await call
    with pytest.raises(EngineError, match="closed"):
        await grade("y")


# What it raises, and what it does not retry or replace


@in_virtual_time
async def test_a_call_and_its_retries_have_the_context_variables_of_their_caller():
    variable = contextvars.ContextVar("variable", default="none")
    seen = {}

    @accelerate(retries=1, interval_s=1)
    async def grade(name):
        seen.setdefault(name, []).append(variable.get())
        if len(seen[name]) == 1:
            raise ValueError

    async def caller(name):
        if name == "secret":
            variable.set(name)
        await grade(name)

    await asyncio.gather(*(caller(name) for name in ("secret", "plain")))
    assert seen == {"secret": ["secret"] * 2, "plain": ["none"] * 2}


@in_virtual_time
async def test_an_argument_that_key_cannot_read_is_the_failure_of_its_own_call():
    async def same(x):
        return x

    function = accelerate(same, default="default", key=lambda x: 1 / (x - 1))
    kept = await function.map([0, 1, 2], return_exceptions=True)
    assert [type(value) for value in kept] == [int, ZeroDivisionError, int]
    with pytest.raises(ZeroDivisionError):
        await function.with_options(default=0).map([0, 1, 2])
    assert (function.statistics().failed["failed"], function.statistics().under_way) == (2, 0)
