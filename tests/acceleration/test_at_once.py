"""Single calls that start without the planner: only while no order is to be kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from qreward_plugins import accelerate
from qreward_plugins.scheduling.planner import Planner
from qreward_plugins.simulation import run


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times at which the planner was asked."""
    asked: list[float] = []
    placements = Planner.placements

    def counted(self: Planner, now: float, **options: Any) -> Any:
        asked.append(now)
        return placements(self, now, **options)

    monkeypatch.setattr(Planner, "placements", counted)
    return asked


async def _second(x: int) -> int:
    await asyncio.sleep(1)
    return x


def test_calls_one_after_the_other_never_ask_the_planner(plans: list[float]) -> None:
    async def main() -> list[int]:
        function = accelerate(_second, rate=1000, concurrency=4, retries=3)
        values = [await function(number) for number in range(5)]
        statistics = function.statistics()
        assert (statistics.calls, statistics.answered, statistics.attempts) == (5, 5, 5)
        return values

    assert run(main()) == list(range(5))
    assert plans == []


def test_a_call_that_fails_is_retried_as_always(plans: list[float]) -> None:
    tries: list[float] = []

    async def main() -> None:
        @accelerate(retries=2, interval_s=3, backoff=1, jitter=0)
        async def function() -> str:
            tries.append(asyncio.get_running_loop().time())
            if len(tries) < 3:
                raise ConnectionError
            return "fine"

        assert await function() == "fine"
        assert function.statistics().retries == 2

    run(main())
    assert [at - tries[0] for at in tries] == [0, 3, 6]
    assert plans


def test_the_last_place_goes_by_priority() -> None:
    order: list[str] = []

    async def main() -> None:
        @accelerate(concurrency=2)
        async def function(name: str) -> None:
            order.append(name)
            await asyncio.sleep(1)

        urgent = function.with_options(priority="high")
        await asyncio.gather(function("a"), function("b"), urgent("urgent"))

    run(main())
    assert order == ["a", "urgent", "b"]


@pytest.mark.parametrize("options", [{"rate": 10}, {"concurrency": 1}, {"concurrency": 4, "hedge": 5.0}], ids=str)
def test_a_limit_that_may_bind_and_a_hedge_are_left_to_the_planner(options: dict[str, Any], plans: list[float]) -> None:
    async def main() -> None:
        assert await accelerate(_second, **options)(1) == 1

    run(main())
    assert plans


def test_a_single_call_waits_behind_a_batch_that_waits() -> None:
    order: list[int] = []

    async def main() -> None:
        @accelerate(concurrency=3)
        async def function(x: int) -> None:
            order.append(x)
            await asyncio.sleep(1)

        batch = asyncio.create_task(function.map(range(6)))
        await asyncio.sleep(0.5)
        await asyncio.gather(batch, function(6))

    run(main())
    assert order[-1] == 6


@pytest.mark.parametrize(("seconds", "hedged_at"), [(5, 5), (0.5, 1)], ids=["due before", "due after"])
def test_the_end_of_a_call_gives_its_place_to_a_hedge_that_waits_for_room(seconds: float, hedged_at: float) -> None:
    starts: list[tuple[str, float]] = []

    async def main() -> None:
        @accelerate(concurrency=2, hedge=1.0)
        async def function(name: str) -> None:
            starts.append((name, asyncio.get_running_loop().time()))
            await asyncio.sleep({"slow": 100, "short": seconds}[name] if len(starts) <= 2 else 0)

        await asyncio.gather(function("slow"), function("short"))

    run(main())
    began = starts[0][1]
    assert [(name, at - began) for name, at in starts] == [("slow", 0), ("short", 0), ("slow", hedged_at)]
