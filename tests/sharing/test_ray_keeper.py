"""The way to the keeper where Ray misbehaves, without a cluster: calls that fail, hang or come twice."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

exceptions = pytest.importorskip("ray.exceptions", reason="Ray is not installed (pip install 'qreward-plugins[ray]')")

from qreward_plugins.config import Limits  # noqa: E402
from qreward_plugins.errors import KeeperLost, KeeperSilent  # noqa: E402
from qreward_plugins.quotas.shared import SharedQuota  # noqa: E402
from qreward_plugins.sharing import ray_keeper  # noqa: E402
from qreward_plugins.sharing.member import Demand, Member  # noqa: E402
from qreward_plugins.sharing.ray_keeper import KeeperActor, RayKeeper  # noqa: E402
from qreward_plugins.system.ray_actors import get_or_start, ray_is_up  # noqa: E402
from qreward_plugins.system.threads import in_thread  # noqa: E402

pytestmark = pytest.mark.anyio
LONG_S = 20.0


def a_member(name="w"):
    return Member(name, {"a": SharedQuota(Limits(requests_per_minute=600), source="a")})


def a_report(member):
    return member.report(asyncio.get_running_loop().time(), {"a": Demand(3)}, {})


class Handle:
    """An actor's handle whose calls end as told."""

    def __init__(self, *ends):
        self.ends = list(ends)
        self.calls = []
        self.exchange = SimpleNamespace(remote=self._call)

    async def _call(self, report):
        self.calls.append(report)
        end = self.ends.pop(0)
        if isinstance(end, BaseException):
            raise end
        return end


@pytest.fixture
def lookups(monkeypatch):
    """What looking the keeper up gives, one after the other, and how often that was done."""
    found = SimpleNamespace(handles=[], count=0, gate=threading.Event())
    found.gate.set()

    def get_or_start(name, cls):
        found.count += 1
        found.gate.wait(LONG_S)
        handle = found.handles.pop(0)
        if isinstance(handle, BaseException):
            raise handle
        return handle

    monkeypatch.setattr(ray_keeper, "get_or_start", get_or_start)
    yield found
    found.gate.set()


@pytest.mark.parametrize(
    ("what", "end", "error", "count"),
    [
        ("call", exceptions.ActorDiedError(), KeeperLost, 2),
        # Whatever else happens says nothing of the keeper: the same one is asked again.
        ("call", exceptions.ActorUnavailableError("not now", None), KeeperSilent, 1),
        ("call", exceptions.RaySystemError("no"), KeeperSilent, 1),
        ("call", ConnectionError("Ray was shut down"), KeeperSilent, 1),
        ("call", RuntimeError("anything"), KeeperSilent, 1),
        ("lookup", ConnectionError("no cluster"), KeeperSilent, 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_only_a_dead_actor_is_a_lost_keeper_and_it_is_looked_up_anew(lookups, what, end, error, count):
    lookups.handles += [end if what == "lookup" else Handle(end, None), Handle(None)]
    way, member = RayKeeper(), a_member()
    with pytest.raises(error, match="has died" if error is KeeperLost else type(end).__name__):
        await way.exchange(a_report(member))
    assert await way.exchange(a_report(member)) is None
    assert lookups.count == count


async def test_however_many_give_up_on_a_lookup_that_hangs_there_is_one(lookups):
    lookups.gate.clear()
    handle = Handle(None)
    lookups.handles.append(handle)
    way, member = RayKeeper(), a_member()
    for _ in range(5):
        call = asyncio.ensure_future(way.exchange(a_report(member)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    last = asyncio.ensure_future(way.exchange(a_report(member)))
    lookups.gate.set()
    assert await asyncio.wait_for(last, LONG_S) is None
    assert (lookups.count, len(handle.calls)) == (1, 1)


async def test_nobody_starts_a_keeper_in_order_to_leave_it(lookups):
    member = a_member()
    assert await RayKeeper().exchange(member.last_report(0.0)) is None
    assert lookups.count == 0


async def test_ending_a_keeper_does_not_wait_and_the_next_call_looks_for_another(lookups, monkeypatch):
    killed, gate = [], threading.Event()

    def kill(handle):
        killed.append(handle)
        gate.wait(LONG_S)

    monkeypatch.setattr(ray_keeper, "kill", kill)
    first, second = Handle(None), Handle(None)
    lookups.handles += [first, second]
    way, member = RayKeeper(), a_member()
    await way.exchange(a_report(member))
    await way.end_keeper()
    assert await way.exchange(a_report(member)) is None
    assert len(second.calls) == 1
    gate.set()
    assert killed == [first]


def test_where_ray_was_shut_down_nobody_starts_it_again():
    if ray_is_up():
        pytest.skip("another test of this process has its Ray")
    with pytest.raises(ConnectionError, match="shut down"):
        get_or_start("nobody", KeeperActor)
    assert not ray_is_up()


def test_a_thread_that_hangs_keeps_no_event_loop_from_ending():
    gate = threading.Event()

    async def main():
        in_thread(lambda: gate.wait(LONG_S))

    asyncio.run(main())
    gate.set()
