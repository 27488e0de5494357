"""A Ray of its own for every test: a keeper that died has heirs, and their first minute is another than a keeper's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from qreward_plugins.testing import JudgeServer, Latency

sys.path.insert(0, str(Path(__file__).parents[2] / "sharing"))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

SWITCH = "QREWARD_RAY_DEATHS"
WINDOW_S = 2.0
PER_WINDOW = 60


@pytest.fixture(scope="session", autouse=True)
def _chosen() -> None:
    if os.environ.get(SWITCH) != "1":
        pytest.skip(f"it takes minutes: set {SWITCH}=1")
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'qreward-plugins[ray]')")


@pytest.fixture
def ray() -> Iterator[object]:
    """A Ray of one node."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def nodes() -> Iterator[object]:
    """A Ray of three nodes on this machine: the driver's, `one` and `two` (resources of that name), each of which may
    have the keeper (a resource, too).
    """
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.named = {name: cluster.add_node(num_cpus=2, resources={name: 100, "keeper": 1}) for name in ("one", "two")}
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[JudgeServer, dict[str, object]]]]:
    """`serve(**limits)` gives a strict judge server, and the configuration of an engine that asks it."""
    from ray_job import both_limits, tree

    with ExitStack() as stack:

        def serve(*, latency_s: float = 0.0, **limits: float) -> tuple[JudgeServer, dict[str, object]]:
            theirs, ours = both_limits(WINDOW_S, **(limits or {"requests": PER_WINDOW}))
            server = stack.enter_context(JudgeServer(limits=theirs, latency=Latency(median_s=latency_s)))
            return server, tree(server, ours)

        yield serve
