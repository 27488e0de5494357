"""A whole node is lost, with the keeper on it or with workers: no limit is broken, and the others go on."""

from __future__ import annotations

import pytest

from qreward_plugins.sharing.keeper import HOLD_S, MARGIN_S, TTL_S

from .conftest import PER_WINDOW, WINDOW_S

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore:.*Tip.*")]


def place(node, tree, count):
    """Workers on the node of that name."""
    from ray_job import start_workers

    return start_workers([tree] * count, resources={node: 1})


def place_keeper(nodes):
    """Start the keeper on one of the two nodes, as a process there would; it may live on the other when that is lost.
    Returns its handle, the name of its node, and that of the other.
    """
    import ray
    from ray_job import LONG_S

    from qreward_plugins.sharing.ray_keeper import NAME, KeeperActor
    from qreward_plugins.system.ray_actors import MANY

    keeper = (
        ray.remote(KeeperActor)
        .options(name=NAME, num_cpus=0, max_restarts=-1, max_concurrency=MANY, resources={"keeper": 1})
        .remote()
    )
    where = ray.get(keeper.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=LONG_S)
    names = sorted(nodes.named, key=lambda name: nodes.named[name].node_id != where)
    assert nodes.named[names[0]].node_id == where
    return keeper, *names


def test_the_node_of_the_keeper_is_lost(nodes, serve):
    from ray_job import boots, check, comes, is_renewed

    server, tree = serve()
    keeper, its_node, other = place_keeper(nodes)
    workers = place(other, tree, 2)
    check(server, [worker.score.remote(range(5)) for worker in workers])
    before = boots(workers)
    scoring = [worker.score.remote(range(1000, 1000 + 3 * PER_WINDOW)) for worker in workers]
    comes(lambda: server.report().requests >= 10 + PER_WINDOW)
    nodes.remove_node(nodes.named[its_node], allow_graceful=False)
    check(server, scoring)
    comes(lambda: is_renewed(workers, before))
    del keeper


def test_a_node_of_workers_is_lost(nodes, serve):
    import ray
    from ray_job import LONG_S, check, comes

    server, tree = serve()
    keeper, its_node, other = place_keeper(nodes)
    staying, lost = place(its_node, tree, 1), place(other, tree, 2)
    check(server, [worker.score.remote(range(5)) for worker in staying + lost])
    scoring = [worker.score.remote(range(1000, 1000 + 8 * PER_WINDOW)) for worker in staying]
    gone = [worker.score.remote(range(2000, 2000 + 6 * PER_WINDOW)) for worker in lost]
    comes(lambda: server.report().requests >= 15 + PER_WINDOW)
    nodes.remove_node(nodes.named[other], allow_graceful=False)
    # Ray takes its time to notice, and to end the processes that it cannot reach any more.
    for each in gone:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(each, timeout=LONG_S)
    comes(
        lambda: ray.get(staying[0].shares.remote(), timeout=LONG_S)["requests"] == PER_WINDOW,
        within_s=TTL_S + MARGIN_S + 2 * WINDOW_S + HOLD_S,
    )
    check(server, scoring)
    del keeper
