"""Limits that the workers of a real Ray job share: all of them used, and none ever broken, whoever is killed; and the
way to the keeper where Ray misbehaves.

More deaths, which take longer, are in tests/conformance/sharing.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from qreward_plugins.errors import KeeperLost, KeeperSilent
from qreward_plugins.journal.journal import current_run
from qreward_plugins.sharing import ray_keeper
from qreward_plugins.sharing.messages import Report
from qreward_plugins.sharing.ray_keeper import NAME, KeeperActor, RayKeeper
from qreward_plugins.system.ray_actors import get_or_start, ray_is_up
from qreward_plugins.testing import JudgeServer
from roll_adapter import barrier

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'qreward-plugins[ray]')")

from .ray_job import (  # noqa: E402
    LONG_S,
    boots,
    both_limits,
    check,
    comes,
    is_renewed,
    keeper,
    pid_of,
    start_workers,
    tree,
)

# Ray leaves sockets and log files of its own to the garbage collector.
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*Tip.*"),
]


# Calls that fail, hang or come twice, without a cluster

SOON_S = 20.0
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
        ("call", ray.exceptions.ActorDiedError(), KeeperLost, 2),
        # Whatever else happens says nothing of the keeper: the same one is asked again.
        ("call", ray.exceptions.ActorUnavailableError("not now", None), KeeperSilent, 1),
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
    monkeypatch.setattr(ray_keeper, "get_or_start", lambda *what: gate.wait(SOON_S) and look_up(*what))
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
    assert await asyncio.wait_for(last, SOON_S) is None
    assert lookups.count == 1


async def test_ending_a_keeper_does_not_wait_and_the_next_call_looks_for_another(lookups, monkeypatch):
    killed, gate = [], threading.Event()

    def kill(handle):
        killed.append(handle)
        gate.wait(SOON_S)

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


# Where Ray runs

PER_WINDOW = 60
THEIRS, OURS = both_limits(1.0, requests=PER_WINDOW)


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def server():
    with JudgeServer(limits=THEIRS) as server:
        yield server


@pytest.fixture(scope="module")
def workers(cluster, server):
    return start_workers([tree(server, OURS)] * 2)


def test_an_engine_has_its_keeper_started_before_anything_is_scored(workers):
    comes(lambda: NAME in ray.util.list_named_actors())
    assert boots(workers) == {""}  # they have asked for nothing yet


def test_the_processes_of_a_job_are_one_run_of_the_journal(workers):
    here = current_run()
    assert here == current_run()
    elsewhere = [worker.__ray_call__.remote(lambda _: current_run()) for worker in workers]
    assert set(ray.get(elsewhere, timeout=LONG_S)) == {here}


def test_a_keeper_that_is_killed_in_the_middle_is_replaced_and_no_limit_is_broken(workers, server):
    before, already = boots(workers), server.report().requests
    scoring = [worker.score.remote(range(2000, 2000 + 3 * PER_WINDOW // 2)) for worker in workers]
    comes(lambda: server.report().requests >= already + PER_WINDOW)
    os.kill(pid_of(keeper()), signal.SIGKILL)
    check(server, scoring)
    comes(lambda: is_renewed(workers, before))


def test_an_actor_lives_as_long_as_the_process_that_started_it(cluster):
    """A handle that was found by name does not keep an actor alive, and must not take the place of one that does."""

    class Anybody:
        async def here(self):
            return True

    first = get_or_start("anybody", Anybody)
    found = get_or_start("anybody", Anybody)
    assert ray.get(found.here.remote(), timeout=LONG_S)
    del first
    gc.collect()
    # Were it let go of, Ray would end it before it gets to another call.
    assert all(ray.get([found.here.remote() for _ in range(100)], timeout=LONG_S))
    assert ray.get(get_or_start("anybody", Anybody).here.remote(), timeout=LONG_S)


def test_the_trajectories_of_roll_s_job_meet_in_an_actor(cluster):
    def settle(trajectory, reward):
        return barrier.settle("g", trajectory, reward, size=3, wait_s=LONG_S, running=lambda: True)

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(settle, "failed", None)
        elsewhere = ray.remote(num_cpus=0)(settle)
        assert ray.get([elsewhere.remote("one", 0.25), elsewhere.remote("two", 0.75)]) == [None, None]
        assert waiting.result(LONG_S) == 0.5
    assert settle("late", 0.125) == 0.5
    ray.kill(barrier.shared_actor(barrier.NAME, barrier.BarrierActor), no_restart=False)
    assert barrier.settle("h", "one", 0.25, size=2, wait_s=LONG_S, running=lambda: True) is None
