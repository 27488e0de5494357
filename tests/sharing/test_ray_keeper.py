"""The way to the keeper where Ray misbehaves, without a cluster: calls that fail, hang or come twice."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

exceptions = pytest.importorskip("ray.exceptions", reason="Ray is not installed (pip install 'qreward-plugins[ray]')")

from qreward_plugins.errors import KeeperLost, KeeperSilent  # noqa: E402
from qreward_plugins.sharing import ray_keeper  # noqa: E402
from qreward_plugins.sharing.messages import Report  # noqa: E402
from qreward_plugins.sharing.ray_keeper import KeeperActor, RayKeeper  # noqa: E402
from qreward_plugins.system.ray_actors import get_or_start, ray_is_up  # noqa: E402

pytestmark = pytest.mark.anyio
LONG_S = 20.0
REPORT = Report("w", 1, {})


def handle(*ends):
    """An actor's handle whose calls end as told: with an error, or with nothing."""

    async def call(report):
        made.calls.append(report)
        if isinstance(end := made.ends.pop(0), BaseException):
            raise end

    made = SimpleNamespace(ends=list(ends), calls=[], exchange=SimpleNamespace(remote=call))
    return made


@pytest.fixture
def lookups(monkeypatch):
    """What looking the keeper up gives, one after the other, and how often that was done."""
    found = SimpleNamespace(handles=[], count=0)

    def get_or_start(name, cls):
        found.count += 1
        if isinstance(handle := found.handles.pop(0), BaseException):
            raise handle
        return handle

    monkeypatch.setattr(ray_keeper, "get_or_start", get_or_start)
    return found


@pytest.mark.parametrize(
    ("what", "end", "error", "count"),
    [
        ("call", exceptions.ActorDiedError(), KeeperLost, 2),
        # Whatever else happens says nothing of the keeper: the same one is asked again.
        ("call", exceptions.ActorUnavailableError("not now", None), KeeperSilent, 1),
        ("call", ConnectionError("Ray was shut down"), KeeperSilent, 1),
        ("lookup", ConnectionError("no cluster"), KeeperSilent, 2),
    ],
    ids=["dead", "unavailable", "shut down", "no cluster"],
)
async def test_only_a_dead_actor_is_a_lost_keeper_and_it_is_looked_up_anew(lookups, what, end, error, count):
    lookups.handles += [end if what == "lookup" else handle(end, None), handle(None)]
    way = RayKeeper()
    with pytest.raises(error, match="has died" if error is KeeperLost else type(end).__name__):
        await way.exchange(REPORT)
    assert await way.exchange(REPORT) is None
    assert lookups.count == count


async def test_callers_share_a_lookup_that_hangs_and_a_last_report_makes_none(lookups, monkeypatch):
    assert await RayKeeper().exchange(REPORT._replace(leaves=True)) is None
    assert lookups.count == 0, "none is started in order to leave it"
    gate, look_up = threading.Event(), ray_keeper.get_or_start
    monkeypatch.setattr(ray_keeper, "get_or_start", lambda *what: gate.wait(LONG_S) and look_up(*what))
    lookups.handles.append(handle(None))
    way = RayKeeper()
    for _ in range(5):
        call = asyncio.ensure_future(way.exchange(REPORT))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    last = asyncio.ensure_future(way.exchange(REPORT))
    gate.set()
    assert await asyncio.wait_for(last, LONG_S) is None
    assert lookups.count == 1


async def test_ending_a_keeper_does_not_wait_and_the_next_call_looks_for_another(lookups, monkeypatch):
    killed, gate = [], threading.Event()

    def kill(handle):
        killed.append(handle)
        gate.wait(LONG_S)

    monkeypatch.setattr(ray_keeper, "kill", kill)
    first, second = handle(None), handle(None)
    lookups.handles += [first, second]
    way = RayKeeper()
    await way.exchange(REPORT)
    await way.end_keeper()
    assert await way.exchange(REPORT) is None
    assert len(second.calls) == 1
    gate.set()
    assert killed == [first]


def test_where_ray_was_shut_down_nobody_starts_it_again():
    if ray_is_up():
        pytest.skip("another test of this process has its Ray")
    with pytest.raises(ConnectionError, match="shut down"):
        get_or_start("nobody", KeeperActor)
    assert not ray_is_up()
