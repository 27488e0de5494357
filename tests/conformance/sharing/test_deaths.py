"""Whoever is killed or stopped in the middle of a batch: no limit is broken, no sample is lost, and nobody hangs."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, contextmanager

import pytest

from qreward_plugins.sharing.keeper import HOLD_S, MARGIN_S, TTL_S
from qreward_plugins.sharing.membership import SILENT_AFTER_S
from qreward_plugins.sharing.ray_keeper import NAME
from qreward_plugins.testing import JudgeServer, Latency

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore:.*Tip.*")]

WINDOW_S = 2.0
PER_WINDOW = 60


@pytest.fixture
def start(ray):
    """`start(count, **limits)` gives a strict judge server, and workers with engines that share its limits; the first
    of them has started the keeper.
    """
    from ray_job import both_limits, comes, start_workers, tree

    with ExitStack() as stack:

        def start(count, *, latency_s=0.0, **limits):
            theirs, ours = both_limits(WINDOW_S, **(limits or {"requests": PER_WINDOW}))
            server = stack.enter_context(JudgeServer(limits=theirs, latency=Latency(median_s=latency_s)))
            trees = [tree({"a": server.base_url}, {"a": ours})] * count
            first = start_workers(trees[:1])
            comes(lambda: NAME in ray.util.list_named_actors())
            return server, first + start_workers(trees[1:])

        yield start


@contextmanager
def stopped(pid):
    """The process does not run meanwhile, and then goes on where it was."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGCONT)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def parts(workers, each, start=0):
    return [
        worker.score.remote(range(start + place * each, start + (place + 1) * each))
        for place, worker in enumerate(workers)
    ]


def check(server, scoring):
    """Every sample is scored, and the server has nothing to complain of."""
    import ray
    from ray_job import LONG_S, scored

    assert scored(*ray.get(scoring, timeout=LONG_S))
    report = server.report()
    assert report.violations_total == 0, report.violations[:5]


def is_renewed(workers, before):
    from ray_job import boots

    now = boots(workers)
    return len(now) == 1 and not now & before


@pytest.mark.parametrize("restart", [True, False], ids=["restarted_by_ray", "killed_for_good"])
def test_a_keeper_is_killed(start, restart):
    import ray
    from ray_job import boots, comes, keeper, kill_process, pid_of

    server, workers = start(3)
    check(server, parts(workers, 5))
    before = boots(workers)
    scoring = parts(workers, 2 * PER_WINDOW, 1000)
    comes(lambda: server.report().requests >= 15 + PER_WINDOW)
    if restart:
        kill_process(pid_of(keeper()))
    else:
        ray.kill(keeper(), no_restart=True)
    check(server, scoring)
    comes(lambda: is_renewed(workers, before))


def test_the_process_that_started_the_keeper_is_killed(start):
    import ray
    from ray_job import boots, comes, kill_process, pid_of

    server, workers = start(3)
    owner, *others = workers
    check(server, [owner.score.remote(range(5))])
    check(server, parts(others, 5, 100))
    before = boots(others)
    lost = owner.score.remote(range(1000, 1000 + 4 * PER_WINDOW))
    scoring = parts(others, 2 * PER_WINDOW, 2000)
    comes(lambda: server.report().requests >= 15 + PER_WINDOW)
    kill_process(pid_of(owner))
    check(server, scoring)
    comes(lambda: is_renewed(others, before))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(lost, timeout=1.0)


def test_what_a_killed_worker_had_comes_back_to_the_others(start):
    import ray
    from ray_job import LONG_S, comes, kill_process, pid_of

    server, workers = start(3, requests=PER_WINDOW, concurrency=6, latency_s=0.2)
    staying, *others = workers  # who started the keeper
    check(server, [staying.score.remote(range(5))])
    lost = parts(others, 10 * PER_WINDOW, 1000)
    # Every place is taken by the two of them but for what the third has in hand.
    comes(lambda: sum(share(worker, "concurrency") for worker in others) >= 4)
    victims = [pid_of(worker) for worker in others]
    scoring = staying.score.remote(range(5000, 5000 + 12 * PER_WINDOW))
    comes(lambda: server.report().requests >= 2 * PER_WINDOW)
    for victim in victims:
        kill_process(victim)
    comes(lambda: share(staying, "concurrency") == 6, within_s=TTL_S + MARGIN_S + HOLD_S)
    comes(lambda: share(staying, "requests") == PER_WINDOW, within_s=2 * WINDOW_S + HOLD_S)
    check(server, [scoring])
    for each in lost:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(each, timeout=LONG_S)


def share(worker, resource):
    import ray
    from ray_job import LONG_S

    return ray.get(worker.shares.remote(), timeout=LONG_S)[resource]


def test_when_the_keeper_is_stopped_for_long_nothing_is_sent_until_it_goes_on(start):
    import time

    from ray_job import boots, comes, keeper, pid_of

    server, workers = start(2)
    check(server, parts(workers, 5))
    before = boots(workers)
    scoring = parts(workers, 6 * PER_WINDOW, 1000)
    comes(lambda: server.report().requests >= 10 + PER_WINDOW)
    with stopped(pid_of(keeper())):
        began = time.monotonic()
        comes(lambda: not any(share(worker, "requests") for worker in workers), within_s=TTL_S + 1.0)
        assert time.monotonic() - began > TTL_S - HOLD_S - 1.0
        silent = server.report().requests
        time.sleep(15.0 - TTL_S)
        assert server.report().requests == silent
    check(server, scoring)
    assert boots(workers) == before


def test_a_keeper_that_is_stopped_for_ever_is_ended(start):
    from ray_job import boots, comes, keeper, pid_of

    server, workers = start(2)
    check(server, parts(workers, 5))
    before, pid = boots(workers), pid_of(keeper())
    scoring = parts(workers, 6 * PER_WINDOW, 1000)
    comes(lambda: server.report().requests >= 10 + PER_WINDOW)
    with stopped(pid):
        comes(lambda: is_renewed(workers, before), within_s=SILENT_AFTER_S + 3 * HOLD_S + 15.0)
        comes(lambda: not alive(pid))
    check(server, scoring)


@pytest.mark.parametrize("limits", [{"requests": PER_WINDOW}, {"requests": PER_WINDOW, "concurrency": 6}], ids=str)
def test_a_worker_that_was_stopped_sends_nothing_that_it_may_not(start, limits):
    from ray_job import comes, pid_of

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
