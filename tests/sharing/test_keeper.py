"""The keeper: until when it charges what workers had, and who is served first."""

from __future__ import annotations

import asyncio

from qreward_plugins.sharing.division import Division, WaitingLine
from qreward_plugins.sharing.keeper import HOLD_S, MARGIN_S, TTL_S, Keeper
from qreward_plugins.sharing.messages import Part, Report, SourceReport
from qreward_plugins.simulation import run
from tests.kit import now

LIMIT, WINDOW_S = 100.0, 60.0


def test_it_charges_something_until_all_that_was_spent_has_left_the_window():
    """Only then may a machine's keeper end, and a first one follow it."""

    async def main():
        def report(worker, number, *, spent=(), more=0.0, leaves=False):
            said = SourceReport({"requests": (LIMIT, WINDOW_S)}, {"requests": Part(0.0, tuple(spent), more)})
            return asyncio.ensure_future(keeper.exchange(Report(worker, number, {"s": said}, leaves, number)))

        keeper = Keeper(boot="k", first=True)
        assert keeper.charges_nothing(now())
        await report("a", 0, more=1000.0)
        assert not keeper.charges_nothing(now())
        assert await report("a", 1, leaves=True, spent=[(20.0, 60.0)]) is None
        await asyncio.sleep(19.9)
        assert not keeper.charges_nothing(now())
        await asyncio.sleep(0.1)
        assert keeper.charges_nothing(now())
        await report("silent", 0, more=1000.0)
        await asyncio.sleep(TTL_S + MARGIN_S + HOLD_S)
        assert keeper.workers == 0
        removed_at = now()
        await asyncio.sleep(WINDOW_S - HOLD_S - 0.1)
        assert not keeper.charges_nothing(now())
        await asyncio.sleep(removed_at + WINDOW_S - now())
        assert keeper.charges_nothing(now())

    run(main())


def test_nobody_overtakes_a_large_request():
    def line(*waiting):
        return WaitingLine(dict.fromkeys(waiting), ("small", "large"), ())

    division = Division(LIMIT, WINDOW_S)
    for worker, part in {"holder": Part(60.0), "small": Part(0.0, (), 5.0), "large": Part(0.0, (), 80.0, 80.0)}.items():
        division.report(worker, part, 0.0, limit=LIMIT, window_s=WINDOW_S)
    assert division.raise_shares(0.0, line("large", "small")) == []
    assert division.raise_shares(0.0, line("small", "large")) == ["small"]
