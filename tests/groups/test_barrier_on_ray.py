"""A barrier over the processes of a real Ray job: its actor is shared, killed, and orphaned."""

from __future__ import annotations

import os
import random
import sys
from contextlib import suppress

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'qreward-plugins[ray]')")

from qreward_plugins.engine.barrier_actor import NAME, Report  # noqa: E402
from qreward_plugins.engine.group_barrier import GroupBarrier  # noqa: E402

# Ray leaves sockets and log files of its own to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore:.*Tip.*")]

# The processes of the cluster cannot import a test.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Worker:
    """A reward worker's part in it."""

    def __init__(self, max_waiting=500):
        self.barrier = GroupBarrier(wait_s=120, answer_s=30, max_waiting=max_waiting)

    async def settle(self, report):
        return await self.barrier.settle(report)

    async def waiting(self):
        return self.barrier.waiting


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def start():
    workers = []

    def start(calls=1000, **settings):
        workers.append(ray.remote(Worker).options(num_cpus=0, max_concurrency=calls).remote(**settings))
        return workers[-1]

    yield start
    for worker in workers:
        ray.kill(worker)


def report(group, sample, reward=None):
    return Report((group, "1"), sample, reward, 4, "train", "" if reward is not None else "infra")


def told(worker, *reports):
    return ray.get([worker.settle.remote(each) for each in reports], timeout=60)


def is_waiting(worker):
    while not ray.get(worker.waiting.remote(), timeout=60):
        pass


def is_there(actor):
    try:
        ray.get(actor.counts.remote(), timeout=60)
    except ray.exceptions.RayActorError:
        return False
    return True


def test_workers_find_one_actor_without_being_told_of_it(start):
    one, other = start(), start()
    waiting = one.settle.remote(report("shared", "0"))
    is_waiting(one)
    assert told(other, report("shared", "1", 0.25), report("shared", "2", 0.75)) == [None, None]
    assert told(other, report("shared", "3")) == [0.5]
    assert ray.get(waiting, timeout=60) == 0.5


@pytest.mark.parametrize("again", [True, False], ids=["restarted_by_ray", "killed_for_good"])
def test_an_actor_that_is_killed_is_replaced_and_who_waits_gets_the_mean(start, again):
    one, other = start(), start()
    group = f"killed-{again}"
    assert told(other, report(group, "1", 0.25)) == [None]
    waiting = one.settle.remote(report(group, "0"))
    is_waiting(one)
    ray.kill(ray.get_actor(NAME), no_restart=not again)
    assert told(other, report(group, "2", 0.75), report(group, "3", 0.5)) == [None, None]
    assert ray.get(waiting, timeout=60) == 0.5


def test_an_actor_whose_owner_is_killed_is_replaced(start):
    with suppress(ValueError):
        ray.kill(ray.get_actor(NAME), no_restart=True)
    owner = start()
    assert told(owner, report("orphaned", "1", 0.25)) == [None]
    one, other = start(), start()
    waiting = one.settle.remote(report("orphaned", "0"))
    is_waiting(one)
    assert told(other, report("orphaned", "2", 0.75)) == [None]
    actor = ray.get_actor(NAME)
    ray.kill(owner)
    while is_there(actor):
        pass
    assert told(other, report("orphaned", "3", 0.25)) == [None]
    # What only the owner knew is lost with it; verl ends then anyway.
    assert told(other, report("orphaned", "1", 0.5)) == [None]
    assert ray.get(waiting, timeout=60) == 0.5


def test_failed_samples_that_wait_never_keep_their_siblings_from_being_scored(start):
    # With as many calls as may wait, 90 % failures fill every call of both workers, and nothing moves any more.
    rng = random.Random(7)
    workers = [start(calls=20, max_waiting=10) for _ in range(2)]
    jobs = [(f"flood{group}", str(sample), rng.random()) for group in range(60) for sample in range(4)]
    rng.shuffle(jobs)
    outcomes = {(group, sample): None if luck < 0.9 else luck for group, sample, luck in jobs}
    calls = {
        (group, sample): rng.choice(workers).settle.remote(report(group, sample, reward))
        for (group, sample), reward in outcomes.items()
    }
    answers = dict(zip(calls, ray.get(list(calls.values()), timeout=60), strict=True))
    for group in {group for group, _ in outcomes}:
        names = [(group, str(sample)) for sample in range(4)]
        given_out = [outcomes[name] if answers[name] is None else answers[name] for name in names]
        means = {answers[name] for name in names} - {None}
        assert len(means) <= 1
        if means:
            assert sum(given_out) / 4 == pytest.approx(means.pop())
