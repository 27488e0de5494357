"""What all tests share."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from qreward_plugins.sharing.machine_channel import VARIABLE

# The same examples in every run, and no time limit for any: a machine of continuous integration may be slow.
# `pytest --hypothesis-profile=default` draws others.
settings.load_profile("ci")

RAY = (
    "recipes/test_verl_recipes.py",
    "sharing/test_ray.py",
    "replicas/test_ray_pool.py",
)
"""Files that start Ray. One process runs them, because several clusters at once starve each other on two processors."""

LONGEST_FIRST = (
    *RAY,
    "sharing/test_machine.py",
    "simulation/test_soak_mutations.py",
    "simulation/test_soak.py",
    "reliability/test_reliability.py",
    "verl_adapter/test_manager.py",
    "sources/test_functions.py",
    "planning/test_measured.py",
    "simulation/test_cluster.py",
    "conformance/verl/test_fake_agrees.py",
    "testing/test_fake_verl.py",
    "recipes/test_launch_scripts.py",
    "sharing/test_limits.py",
)
"""Files that take long for the number of their tests. A process of pytest-xdist takes whole files, so a long one among
the last would leave the other processes without work. (`--no-loadscope-reorder` keeps this order.)
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ranks = {here / name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.hookimpl(optionalhook=True)  # the hook of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files, and all files that start Ray to one process."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "Ray" if file.removeprefix("tests/") in RAY else file

    return Scheduling(config, log)


# Also for what is opened before the first test.
os.environ[VARIABLE] = f"/tmp/qr-{os.getpid()}"
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def own_limits() -> Iterator[None]:
    """Let each test, and the processes that it starts, share limits with nobody else. A keeper that it has started ends
    with the directory.
    """
    before = os.environ[VARIABLE]
    directory = os.environ[VARIABLE] = f"{before}-{next(_numbers)}"
    yield
    os.environ[VARIABLE] = before
    if os.path.exists(directory):
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def short_directory() -> Iterator[str]:
    """A private directory for sockets, whose paths must be short. That of `tmp_path` may be too long."""
    # Files may be removed from it meanwhile.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="qr", ignore_cleanup_errors=True) as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def collect_little() -> None:
    """Keep what is imported out of garbage collections. One that goes through torch, verl and Ray takes 0.2 s, and many
    tests collect the garbage to find what was left behind.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution of one module, as pip would lay it out. `entry_points`: by group, name to object."""
    modules = []

    def install(name, module, text, entry_points, version="1.2"):
        site = tmp_path / name
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [
            line
            for group, points in entry_points.items()
            for line in (f"[{group}]", *(f"{key} = {path}" for key, path in points.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        (site / f"{module}.py").write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(str(site))
        modules.append(module)
        sys.modules.pop(module, None)

    yield install
    for module in modules:
        sys.modules.pop(module, None)
