"""Limits that workers share on Ray: jobs that end."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from qreward_plugins.testing import JudgeServer
from tests.kit import Program

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore:.*Tip.*")]


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
    with JudgeServer() as server, ExitStack() as stack:
        options = {"env": environment, "stdin": subprocess.PIPE}
        jobs = [stack.enter_context(Program("-c", JOB, server.base_url, **options)) for _ in range(2)]
        assert len({job.line("boot ") for job in jobs}) == 2
        assert len(keepers()) == 2
        jobs[0].communicate("\n", timeout=60)
        comes(lambda: len(keepers()) == 1)
        jobs[1].end()
        comes(lambda: keepers() == [])
