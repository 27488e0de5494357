"""What calls of an accelerated function have of their own (keys, context, hedges) and share, in virtual time."""

from __future__ import annotations

import asyncio
import contextvars
import logging

import pytest

from qreward_plugins import CircuitOpen, Throttled, accelerate
from qreward_plugins.simulation import run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_key_whose_calls_waited_long_is_not_forgotten_within_its_window():
    starts = {}

    @accelerate(rate="1/min", window="sliding", key=lambda key: key, idle_s=1)
    async def grade(key):
        starts.setdefault(key, []).append(now())

    async def main():
        await asyncio.gather(*(grade("a") for _ in range(10)))
        await grade("b")
        await grade("a")

    run(main())
    assert min(later - sooner for sooner, later in zip(starts["a"], starts["a"][1:], strict=False)) >= 60


def test_a_key_is_not_forgotten_while_it_is_paused_or_its_circuit_is_open():
    starts = []

    @accelerate(key=lambda key: key, idle_s=1, breaker=1, recovery_s=30)
    async def grade(key):
        starts.append((key, now()))
        if key == "throttled" and len(starts) == 1:
            raise Throttled("later", retry_after_s=50)
        if key == "failing":
            raise ValueError

    async def main():
        with pytest.raises(Throttled):
            await grade("throttled")
        await asyncio.sleep(5)
        await grade("other")
        with pytest.raises(CircuitOpen):
            await grade("throttled")
        with pytest.raises(ValueError):  # noqa: PT011
            await grade("failing")
        await asyncio.sleep(5)
        await grade("other")
        with pytest.raises(CircuitOpen):
            await grade("failing")

    run(main())


def test_keys_that_failed_are_forgotten_once_their_circuits_have_recovered(caplog):
    caplog.set_level(logging.ERROR)

    @accelerate(key=lambda key: key, idle_s=1, breaker=1, recovery_s=1)
    async def grade(key):
        raise ValueError

    async def main():
        for key in range(50):
            with pytest.raises(ValueError):  # noqa: PT011
                await grade(key)
            await asyncio.sleep(2)
        return grade.statistics().keys

    assert run(main()) < 3


def test_the_calls_of_all_keys_have_different_numbers():
    numbers = []

    @accelerate(key=lambda key: key, observers=[lambda event: numbers.append(getattr(event, "call", None))])
    async def grade(key):
        pass

    async def main():
        await grade("a")
        await grade("b")

    run(main())
    assert sorted({number for number in numbers if number is not None}) == [0, 1]


def test_a_call_never_sees_the_context_variables_of_another_caller():
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

    async def main():
        await asyncio.gather(*(caller(name) for name in ("secret", "plain", "other")))

    run(main())
    assert seen == {"secret": ["secret"] * 2, "plain": ["none"] * 2, "other": ["none"] * 2}


@pytest.mark.parametrize(("options", "starts"), [({"retries": 3}, [0, 1, 3]), ({"max_hedges": 2}, [0, 1, 1])])
def test_a_hedge_that_failed_is_replaced_as_long_as_attempts_are_left(options, starts):
    began = []

    @accelerate(hedge=1.0, interval_s=2, jitter=0, **options)
    async def grade():
        began.append(now())
        if len(began) == 2:
            raise ConnectionError
        await asyncio.sleep(100 if len(began) == 1 else 1)
        return len(began)

    assert run(grade()) == 3
    assert began == starts


def test_a_hedge_that_failed_is_not_replaced_beyond_the_retries():
    began = []

    @accelerate(hedge=1.0, retries=2, interval_s=0)
    async def grade():
        began.append(now())
        if len(began) > 1:
            raise ConnectionError
        await asyncio.sleep(100)

    run(grade())
    assert len(began) == 1 + 2 + 1


def test_map_wakes_once_whatever_its_length():
    @accelerate(concurrency=8)
    async def grade(x):
        await asyncio.sleep(x % 5)
        return x

    async def main():
        waits = 0
        real = asyncio.wait

        async def counted(*args, **kwargs):
            nonlocal waits
            waits += 1
            return await real(*args, **kwargs)

        asyncio.wait = counted
        try:
            assert await grade.map(range(200)) == list(range(200))
        finally:
            asyncio.wait = real
        return waits

    assert run(main()) < 5
