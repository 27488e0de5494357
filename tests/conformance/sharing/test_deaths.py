"""Whoever is killed or stopped in the middle of a batch: no limit is broken, no sample is lost, and nobody hangs."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import psutil
import pytest

from qreward_plugins.sharing.keeper import HOLD_S, MARGIN_S, TTL_S
from qreward_plugins.sharing.membership import SILENT_AFTER_S
from qreward_plugins.sharing.ray_keeper import NAME

from .conftest import PER_WINDOW, WINDOW_S

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore:.*Tip.*")]


@pytest.fixture
def start(ray, serve):
    """`start(count, **limits)` gives a strict judge server, and workers with engines that share its limits; the first
    of them has started the keeper.
    """
    from ray_job import comes, start_workers

    def start(count, **limits):
        server, tree = serve(**limits)
        first = start_workers([tree])
        comes(lambda: NAME in ray.util.list_named_actors())
        return server, first + start_workers([tree] * (count - 1))

    return start


@contextmanager
def stopped(pid):
    """The process does not run meanwhile, and then goes on where it was."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


def parts(workers, each, start=0):
    return [
        worker.score.remote(range(start + place * each, start + (place + 1) * each))
        for place, worker in enumerate(workers)
    ]


def test_the_process_that_started_the_keeper_is_killed(start):
    import ray
    from ray_job import boots, check, comes, is_renewed, pid_of

    server, workers = start(3)
    owner, *others = workers
    check(server, [owner.score.remote(range(5))])
    check(server, parts(others, 5, 100))
    before = boots(others)
    lost = owner.score.remote(range(1000, 1000 + 4 * PER_WINDOW))
    scoring = parts(others, 2 * PER_WINDOW, 2000)
    comes(lambda: server.report().requests >= 15 + PER_WINDOW)
    os.kill(pid_of(owner), signal.SIGKILL)
    check(server, scoring)
    comes(lambda: is_renewed(others, before))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(lost, timeout=1.0)


def share(worker, resource):
    import ray
    from ray_job import LONG_S

    return ray.get(worker.shares.remote(), timeout=LONG_S)[resource]


def test_a_keeper_that_is_stopped_for_ever_is_ended(start):
    from ray_job import boots, check, comes, is_renewed, keeper, pid_of

    server, workers = start(2)
    check(server, parts(workers, 5))
    before, pid = boots(workers), pid_of(keeper())
    scoring = parts(workers, 6 * PER_WINDOW, 1000)
    comes(lambda: server.report().requests >= 10 + PER_WINDOW)
    with stopped(pid):
        comes(lambda: is_renewed(workers, before), within_s=SILENT_AFTER_S + 3 * HOLD_S + 15.0)
        comes(lambda: not psutil.pid_exists(pid))
    check(server, scoring)


@pytest.mark.parametrize("limits", [{"requests": PER_WINDOW}, {"requests": PER_WINDOW, "concurrency": 6}], ids=str)
def test_a_worker_that_was_stopped_sends_nothing_that_it_may_not(start, limits):
    from ray_job import check, comes, pid_of

    server, workers = start(2, latency_s=0.2, **limits)
    check(server, parts(workers, 5))
    scoring = parts(workers, 5 * PER_WINDOW, 1000)
    comes(lambda: server.report().requests >= 10 + PER_WINDOW)
    _, victim = workers
    with stopped(pid_of(victim)):
        # Meanwhile the other has everything.
        comes(lambda: share(workers[0], "requests") == PER_WINDOW, within_s=TTL_S + MARGIN_S + 2 * WINDOW_S + HOLD_S)
        already = server.report().requests
        comes(lambda: server.report().requests >= already + PER_WINDOW)
    check(server, scoring)
