"""Limits that the workers of a Ray job share, on a real Ray whose processes and nodes are killed and stopped: no limit
is broken, no sample is lost, and nobody hangs.

It takes minutes, so it runs where `QREWARD_RAY_DEATHS=1` is set. Every test has a Ray of its own: a keeper that died
has heirs, and their first minute is another than a keeper's.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from qreward_plugins.sharing.keeper import HOLD_S, MARGIN_S, TTL_S
from qreward_plugins.sharing.membership import SILENT_AFTER_S
from qreward_plugins.sharing.ray_keeper import NAME, KeeperActor
from qreward_plugins.system.ray_actors import MANY
from qreward_plugins.testing import JudgeServer, Latency
from tests.kit import later

sys.path.insert(0, str(Path(__file__).parents[2] / "sharing"))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = later("ray")
job = later("ray_job")

SWITCH = "QREWARD_RAY_DEATHS"
WINDOW_S = 2.0
PER_WINDOW = 60

pytestmark = [
    pytest.mark.skipif(os.environ.get(SWITCH) != "1", reason=f"it takes minutes: set {SWITCH}=1"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*Tip.*"),
]


@pytest.fixture
def one_node():
    """A Ray of one node."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def nodes():
    """A Ray of three nodes on this machine: the driver's, `one` and `two` (resources of that name), each of which may
    have the keeper (a resource, too).
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.named = {name: cluster.add_node(num_cpus=2, resources={name: 100, "keeper": 1}) for name in ("one", "two")}
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def serve():
    """`serve(**limits)` gives a strict judge server, and the configuration of an engine that asks it."""
    with ExitStack() as stack:

        def serve(*, latency_s=0.0, **limits):
            theirs, ours = job.both_limits(WINDOW_S, **(limits or {"requests": PER_WINDOW}))
            server = stack.enter_context(JudgeServer(limits=theirs, latency=Latency(median_s=latency_s)))
            return server, job.tree(server, ours)

        yield serve


@pytest.fixture
def start(one_node, serve):
    """`start(count, **limits)` gives a strict judge server, and workers with engines that share its limits; the first
    of them has started the keeper.
    """

    def start(count, **limits):
        server, tree = serve(**limits)
        first = job.start_workers([tree])
        job.comes(lambda: NAME in ray.util.list_named_actors())
        return server, first + job.start_workers([tree] * (count - 1))

    return start


def has_all(worker):
    """Wait until a worker has all requests, since the others are gone."""
    within_s = TTL_S + MARGIN_S + 2 * WINDOW_S + HOLD_S
    job.comes(lambda: ray.get(worker.shares.remote(), timeout=job.LONG_S)["requests"] == PER_WINDOW, within_s)


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
    server, workers = start(3)
    owner, *others = workers
    job.check(server, [owner.score.remote(range(5))])
    job.check(server, parts(others, 5, 100))
    before = job.boots(others)
    lost = owner.score.remote(range(1000, 1000 + 4 * PER_WINDOW))
    scoring = parts(others, 2 * PER_WINDOW, 2000)
    job.comes(lambda: server.report().requests >= 15 + PER_WINDOW)
    os.kill(job.pid_of(owner), signal.SIGKILL)
    job.check(server, scoring)
    job.comes(lambda: job.is_renewed(others, before))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(lost, timeout=1.0)


def test_a_keeper_that_is_stopped_for_ever_is_ended(start):
    server, workers = start(2)
    job.check(server, parts(workers, 5))
    before, pid = job.boots(workers), job.pid_of(job.keeper())
    scoring = parts(workers, 6 * PER_WINDOW, 1000)
    job.comes(lambda: server.report().requests >= 10 + PER_WINDOW)
    with stopped(pid):
        job.comes(lambda: job.is_renewed(workers, before), within_s=SILENT_AFTER_S + 3 * HOLD_S + 15.0)
        job.comes(lambda: not psutil.pid_exists(pid))
    job.check(server, scoring)


@pytest.mark.parametrize("limits", [{"requests": PER_WINDOW}, {"requests": PER_WINDOW, "concurrency": 6}], ids=str)
def test_a_worker_that_was_stopped_sends_nothing_that_it_may_not(start, limits):
    server, workers = start(2, latency_s=0.2, **limits)
    job.check(server, parts(workers, 5))
    scoring = parts(workers, 5 * PER_WINDOW, 1000)
    job.comes(lambda: server.report().requests >= 10 + PER_WINDOW)
    _, victim = workers
    with stopped(job.pid_of(victim)):
        has_all(workers[0])
        already = server.report().requests
        job.comes(lambda: server.report().requests >= already + PER_WINDOW)
    job.check(server, scoring)


# A whole node is lost, with the keeper on it or with workers


def place(node, tree, count):
    """Workers on the node of that name."""
    return job.start_workers([tree] * count, resources={node: 1})


def place_keeper(nodes):
    """Start the keeper on one of the two nodes, as a process there would; it may live on the other when that is lost.
    Returns its handle, the name of its node, and that of the other.
    """
    keeper = (
        ray.remote(KeeperActor)
        .options(name=NAME, num_cpus=0, max_restarts=-1, max_concurrency=MANY, resources={"keeper": 1})
        .remote()
    )
    context = ray.get_runtime_context
    where = ray.get(keeper.__ray_call__.remote(lambda _: context().get_node_id()), timeout=job.LONG_S)
    names = sorted(nodes.named, key=lambda name: nodes.named[name].node_id != where)
    assert nodes.named[names[0]].node_id == where
    return keeper, *names


def test_the_node_of_the_keeper_is_lost(nodes, serve):
    server, tree = serve()
    keeper, its_node, other = place_keeper(nodes)
    workers = place(other, tree, 2)
    job.check(server, [worker.score.remote(range(5)) for worker in workers])
    before = job.boots(workers)
    scoring = [worker.score.remote(range(1000, 1000 + 3 * PER_WINDOW)) for worker in workers]
    job.comes(lambda: server.report().requests >= 10 + PER_WINDOW)
    nodes.remove_node(nodes.named[its_node], allow_graceful=False)
    job.check(server, scoring)
    job.comes(lambda: job.is_renewed(workers, before))
    del keeper


def test_a_node_of_workers_is_lost(nodes, serve):
    server, tree = serve()
    keeper, its_node, other = place_keeper(nodes)
    staying, lost = place(its_node, tree, 1), place(other, tree, 2)
    job.check(server, [worker.score.remote(range(5)) for worker in staying + lost])
    scoring = [worker.score.remote(range(1000, 1000 + 8 * PER_WINDOW)) for worker in staying]
    gone = [worker.score.remote(range(2000, 2000 + 6 * PER_WINDOW)) for worker in lost]
    job.comes(lambda: server.report().requests >= 15 + PER_WINDOW)
    nodes.remove_node(nodes.named[other], allow_graceful=False)
    # Ray takes its time to notice, and to end the processes that it cannot reach any more.
    for each in gone:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(each, timeout=job.LONG_S)
    has_all(staying[0])
    job.check(server, scoring)
    del keeper
