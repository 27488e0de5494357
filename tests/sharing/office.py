"""A keeper in virtual time, and engines that share a source by it: the real ones, with a line between them that does
what a test tells it.
"""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.errors import KeeperLost, KeeperSilent
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sharing import ray_keeper
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import Reply

WINDOW_S = 10.0
MARGIN = 0.15
"""What the ledgers add to a window."""


class Office:
    """Where the keeper is: it can be replaced, fall silent or be gone, and remembers what it was asked."""

    def __init__(self, *, first=True, delay_s=0.0):
        self.mode = "well"
        self.delay_s = delay_s
        self.stall_s = 0.0
        """For how long nothing runs when an answer has come."""
        self.reports = []
        self.ended = 0
        self.first = first
        self.actor = None
        self.replace()

    def replace(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray_keeper, "first_start", lambda name: self.first)
            self.actor = ray_keeper.KeeperActor()
        self.first = False

    def line(self):
        return Line(self)

    def delay(self):
        """How long a message is on its way."""
        return self.delay_s

    def sent_by(self, engine):
        """(time, report) of an engine."""
        name = engine._lifetime.membership.member.name
        return [(at, report) for at, report in self.reports if report.worker == name]


class Line:
    """A worker's way to the office."""

    def __init__(self, office):
        self.office = office

    async def exchange(self, report):
        office = self.office
        office.reports.append((asyncio.get_running_loop().time(), report))
        if office.mode == "lost":
            raise KeeperLost("it is dead")
        if office.mode == "unavailable":
            raise KeeperSilent("it cannot be reached")
        if office.mode == "broken":
            raise ZeroDivisionError("a bug")
        if office.mode == "silent":
            await asyncio.get_running_loop().create_future()
        # Where a caller gives up, a real keeper does not hear of it.
        answer = await asyncio.shield(asyncio.ensure_future(self._deliver(report)))
        asyncio.get_running_loop()._now += office.stall_s
        return answer

    async def end_keeper(self):
        self.office.ended += 1

    async def _deliver(self, report):
        await asyncio.sleep(self.office.delay())
        answer = await self.office.actor.exchange(report)
        await asyncio.sleep(self.office.delay())
        return answer


class Connecting(SimulatedSource):
    """A source that sends only once its gate is open, as one does that has to connect first."""

    gate = None

    async def send(self, request, *, on_sent):
        if self.gate is not None:
            await self.gate.wait()
        return await super().send(request, on_sent=on_sent)


def verdict(request):
    return Reply(text=f'{{"id": "{request.nonce}", "score": 0.5}}', usage=Usage(10, 10))


def a_source(**fields):
    return Connecting("a", answer=verdict, **{"window_s": WINDOW_S, **fields})


def limits(per_window=None, **fields):
    if per_window is not None:
        fields |= {"requests_per_minute": per_window * 60 / WINDOW_S, "window_s": WINDOW_S, "window": "sliding"}
    return fields


def samples(count, start=0):
    return [
        Sample([{"role": "user", "content": "Which number is it?"}], f"It is {number}.", id=str(number))
        for number in range(start, start + count)
    ]


def an_engine(office, source, limits, **settings):
    """An engine whose way to its keeper is the office's."""
    node = {"kind": "openai", "base_url": "http://localhost", "model": "judge", "limits": limits}
    tree = {
        "sources": {"a": node},
        "judges": {"quality": {"kind": "llm", "score_range": [0, 1]}},
        "engine": {"seed": 7, "deadline_s": 600.0, "scheduling": {"hedge": False}, **settings},
    }
    return RewardEngine(tree, sources={"a": source}, channel=office.line())
