"""The packages below `examples/`, installed by pip into a folder of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """A folder with all example packages in it; without the network."""
    folder = tmp_path_factory.mktemp("examples")
    packages = []
    for path in sorted(EXAMPLES.glob("*/pyproject.toml")):
        # Building writes beside the source.
        packages.append(str(shutil.copytree(path.parent, folder / "source" / path.parent.name)))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-build-isolation", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*pip, *offline, *packages], check=True, timeout=120)
    return folder / "site"


@pytest.fixture(autouse=True)
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
