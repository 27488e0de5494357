"""Limits that workers share on Ray: who joins and who leaves, and jobs that end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qreward_plugins.testing import JudgeServer

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore:.*Tip.*")]

WINDOW_S = 2.0
PER_WINDOW = 60


@pytest.fixture
def limits():
    """The limits of most servers here, as they enforce them and as they are declared."""
    from ray_job import both_limits

    return both_limits(WINDOW_S, requests=PER_WINDOW)


@pytest.fixture
def server(limits):
    with JudgeServer(limits=limits[0]) as server:
        yield server


def check(server, scoring):
    import ray
    from ray_job import LONG_S, scored

    assert scored(*ray.get(scoring, timeout=LONG_S))
    report = server.report()
    assert report.violations_total == 0, report.violations[:5]


def test_whoever_joins_gets_its_part_and_whoever_leaves_gives_it_back(ray, server, limits):
    from ray_job import LONG_S, comes, start_workers, tree

    config = tree({"a": server.base_url}, {"a": limits[1]})

    def share(worker):
        return ray.get(worker.shares.remote(), timeout=LONG_S)["requests"]

    first, second = start_workers([config] * 2)
    scoring = first.score.remote(range(8 * PER_WINDOW))
    comes(lambda: share(first) == PER_WINDOW)
    joining = second.score.remote(range(2000, 2000 + 2 * PER_WINDOW))
    comes(lambda: share(second) >= PER_WINDOW // 2 - 1)
    check(server, [joining])
    ray.get(second.close.remote(), timeout=LONG_S)
    comes(lambda: share(first) == PER_WINDOW, within_s=2 * WINDOW_S + 2.0)
    check(server, [scoring])


JOB = """
import sys
import ray
ray.init(address="auto", log_to_driver=False)
from ray_job import start_workers, tree
(worker,) = start_workers([tree({"a": sys.argv[1]}, {"a": {"requests_per_minute": 6000}})])
assert set(ray.get(worker.score.remote(range(5)))) == {"scored"}
print("boot", ray.get(worker.boot.remote()), flush=True)
sys.stdin.readline()
"""


def test_a_job_has_a_keeper_of_its_own_that_ends_with_it(ray):
    from ray.util import list_named_actors
    from ray_job import comes

    from qreward_plugins.sharing.ray_keeper import NAME

    def keepers():
        return [actor for actor in list_named_actors(all_namespaces=True) if actor["name"] == NAME]

    folder = str(Path(sys.modules["ray_job"].__file__).parent)
    paths = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_ADDRESS": address}
    with JudgeServer() as server:
        jobs = [
            subprocess.Popen(
                [sys.executable, "-c", JOB, server.base_url],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        try:
            told = [job.stdout.readline() for job in jobs]
            assert all(line.startswith("boot ") for line in told)
            assert len(set(told)) == 2
            assert len(keepers()) == 2
            jobs[0].communicate("\n", timeout=60)
            comes(lambda: len(keepers()) == 1)
            jobs[1].kill()
            jobs[1].communicate(timeout=60)
            comes(lambda: keepers() == [])
        finally:
            for job in jobs:
                job.kill()
                job.communicate()
