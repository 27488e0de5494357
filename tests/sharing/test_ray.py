"""Limits that the workers of a real Ray job share: all of them used, and none ever broken, whoever is killed.

More deaths, which take longer, are in tests/conformance/sharing.
"""

from __future__ import annotations

import gc
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'qreward-plugins[ray]')")

from ray_job import (  # noqa: E402
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

from qreward_plugins.journal.journal import current_run  # noqa: E402
from qreward_plugins.sharing.ray_keeper import NAME  # noqa: E402
from qreward_plugins.system.ray_actors import get_or_start  # noqa: E402
from qreward_plugins.testing import JudgeServer  # noqa: E402
from roll_adapter import barrier  # noqa: E402

# Ray leaves sockets and log files of its own to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore:.*Tip.*")]

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
    return start_workers([tree({"a": server.base_url}, {"a": OURS})] * 2)


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
