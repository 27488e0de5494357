"""What an accelerated function raises, and what it does not retry or replace, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import EngineError, accelerate
from qreward_plugins.simulation import run


def test_a_function_that_cancels_itself_is_not_retried_unless_that_is_named():
    attempts = []

    async def cancels():
        attempts.append(1)
        raise asyncio.CancelledError("mine")

    async def main(**options):
        attempts.clear()
        with pytest.raises(asyncio.CancelledError, match="mine"):
            await accelerate(cancels, retries=3, interval_s=0, **options)()
        return len(attempts)

    assert run(main()) == 1
    assert run(main(retry_on=BaseException)) == 4


def test_an_error_tells_that_the_predicate_raised():
    @accelerate(retries=3, retry_on=lambda error: 1 / 0)
    async def fails():
        raise ValueError("x")

    async def main():
        with pytest.raises(ValueError, match="x") as raised:
            await fails()
        return raised.value.__notes__

    note = "accelerate: not retried, because retry_on raised ZeroDivisionError: division by zero"
    assert run(main()) == [note]


def test_an_argument_that_key_cannot_read_is_the_failure_of_its_own_call():
    async def same(x):
        return x

    async def main():
        function = accelerate(same, default="default", key=lambda x: 1 / (x - 1))
        kept = await function.map([0, 1, 2], return_exceptions=True)
        kept += [value async for value in function.stream([0, 1, 2], return_exceptions=True)]
        assert [type(value) for value in kept] == 2 * [int, ZeroDivisionError, int]
        with pytest.raises(ZeroDivisionError):
            await function.with_options(default=0).map([0, 1, 2])
        statistics = function.statistics()
        assert (statistics.failed["failed"], statistics.under_way) == (3, 0)

    run(main())


def test_a_default_stands_in_for_an_engine_error_of_the_function_but_not_for_ours():
    @accelerate(default=7)
    async def fails():
        raise EngineError("of an engine that it uses")

    async def main():
        assert await fails() == 7
        await fails.aclose()
        with pytest.raises(EngineError, match="closed"):
            await fails()

    run(main())
