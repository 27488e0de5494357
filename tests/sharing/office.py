"""A keeper in virtual time, and engines that share a source by it: the real ones, with a line between them that does
what a test tells it.
"""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import RewardEngine, Scored
from qreward_plugins.errors import KeeperLost, KeeperSilent
from qreward_plugins.sharing import ray_keeper
from qreward_plugins.simulation import SimulatedSource
from tests.kit import make_config, make_sample, now, scored_text

WINDOW_S = 10.0
MARGIN = 0.15
"""What the ledgers add to a window."""
PROBLEMS = {"lost": KeeperLost("it is dead"), "unavailable": KeeperSilent("no way"), "broken": ZeroDivisionError()}


class Office:
    """Where the keeper is, and a worker's way to it: it can be replaced, fall silent or be gone, and remembers what it
    was asked.
    """

    def __init__(self, *, first=True, delay_s=0.0):
        self.mode = "well"
        self.delay_s = delay_s
        self.reports = []
        self.ended = 0
        self.first = first
        self.replace()

    def replace(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray_keeper, "first_start", lambda name: self.first)
            self.actor = ray_keeper.KeeperActor()
        self.first = False

    def delay(self):
        """How long a message is on its way."""
        return self.delay_s

    def sent_by(self, engine):
        """When an engine has sent reports."""
        name = engine._lifetime.membership.member.name
        return [at for at, report in self.reports if report.worker == name]

    async def exchange(self, report):
        self.reports.append((now(), report))
        if self.mode in PROBLEMS:
            raise PROBLEMS[self.mode]
        if self.mode == "silent":
            await asyncio.get_running_loop().create_future()
        # Where a caller gives up, a real keeper does not hear of it.
        return await asyncio.shield(asyncio.ensure_future(self._deliver(report)))

    async def end_keeper(self):
        self.ended += 1

    async def _deliver(self, report):
        await asyncio.sleep(self.delay())
        answer = await self.actor.exchange(report)
        await asyncio.sleep(self.delay())
        return answer


async def until(moment):
    await asyncio.sleep(moment - now())


def a_source(**fields):
    return SimulatedSource("a", answer=scored_text, **{"window_s": WINDOW_S, **fields})


def limits(per_window=None, window_s=WINDOW_S, **fields):
    if per_window is not None:
        fields |= {"requests_per_minute": per_window * 60 / window_s, "window_s": window_s, "window": "sliding"}
    return fields


def samples(count, start=0):
    return [make_sample(number) for number in range(start, start + count)]


def all_scored(outcomes):
    return all(isinstance(outcome, Scored) for outcome in outcomes)


def an_engine(office, source, limits, **settings):
    """An engine whose way to its keeper is the office's."""
    engine = {"deadline_s": 600.0, "scheduling": {"hedge": False}, **settings}
    tree = make_config("a", limits={"a": limits}, engine=engine, total_s=60)
    return RewardEngine(tree, sources={"a": source}, channel=office)
