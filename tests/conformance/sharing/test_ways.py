"""A bad way to the keeper, clocks that differ, several limits at once, and jobs and engines that end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qreward_plugins.testing import JudgeServer, Latency

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


def bad_way(seed):
    """Makes a way to the keeper that delays, loses, doubles and swaps what is said, by a seed."""

    def make():
        import asyncio
        import random

        from qreward_plugins.errors import KeeperSilent
        from qreward_plugins.sharing.ray_keeper import RayKeeper

        class BadWay:
            def __init__(self):
                self._way, self._rng, self._kept = RayKeeper(), random.Random(seed), []

            async def exchange(self, report):
                rng = self._rng
                if rng.random() < 0.1:
                    await asyncio.sleep(rng.uniform(0.0, 1.0))
                    raise KeeperSilent("the report was lost")
                self._kept.append(asyncio.ensure_future(self._deliver(report)))
                if rng.random() < 0.2:
                    self._kept.append(asyncio.ensure_future(self._deliver(report)))
                call = self._kept[-1]
                # Cancelled or not, what was sent arrives: often after the next one.
                answer = await asyncio.shield(call)
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.05, 1.5)))
                if rng.random() < 0.1:
                    raise KeeperSilent("the answer was lost")
                return answer

            async def _deliver(self, report):
                await asyncio.sleep(self._rng.choice((0.0, 0.0, 0.1, 0.4, 1.5)))
                return await self._way.exchange(report)

            async def end_keeper(self):
                await self._way.end_keeper()

        return BadWay()

    return make


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_said_comes_late_twice_in_disorder_or_never(ray, server, limits, seed):
    from ray_job import start_workers, tree

    config = tree({"a": server.base_url}, {"a": limits[1]})
    workers = [start_workers([config], bad_way(10 * seed + place))[0] for place in range(3)]
    check(server, [worker.score.remote(range(2 * PER_WINDOW)) for worker in workers])


def test_a_worker_s_clock_is_far_off_and_drifts(ray, server, limits):
    from ray_job import DriftingWorker, start_workers, tree

    config = tree({"a": server.base_url}, {"a": limits[1]})
    (worker,) = start_workers([config])
    other = ray.remote(DriftingWorker).options(num_cpus=0).remote(config)
    check(server, [each.score.remote(range(3 * PER_WINDOW)) for each in (worker, other)])


def test_several_sources_with_limits_of_every_kind(ray, limits):
    from ray_job import both_limits, start_workers, tree

    kinds = {
        "a": {"requests": 40, "concurrency": 5},
        "b": {"tokens": 20_000},
        "c": {"requests": 50, "tokens": 20_000, "concurrency": 6},
    }
    both = {name: both_limits(WINDOW_S, **kind) for name, kind in kinds.items()}
    servers = {name: JudgeServer(limits=theirs, latency=Latency(median_s=0.1)) for name, (theirs, _) in both.items()}
    with servers["a"], servers["b"], servers["c"]:
        config = tree(
            {name: server.base_url for name, server in servers.items()},
            {name: ours for name, (_, ours) in both.items()},
        )
        workers = start_workers([config] * 3)
        scoring = [worker.score.remote(range(200)) for worker in workers]
        for server in servers.values():
            check(server, scoring)
        assert all(server.report().requests > 50 for server in servers.values())


def test_without_a_keeper_every_process_keeps_to_its_part(ray, server, limits):
    from ray_job import start_workers, tree

    config = tree({"a": server.base_url}, {"a": limits[1]}, shared="local")
    workers = start_workers([config] * 2, None, 2)
    check(server, [worker.score.remote(range(PER_WINDOW)) for worker in workers])
    with pytest.raises(ValueError, match="qreward-keeper"):
        ray.get_actor("qreward-keeper")


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
