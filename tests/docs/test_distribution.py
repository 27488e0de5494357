"""What a package index shows: the README with links that work there, the project's URLs, the version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import qreward_plugins

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture
def built():
    """Returns the metadata of a distribution that is built now."""
    return lambda: ProjectMetadata(str(ROOT), PluginManager())


def test_without_an_address_the_readme_has_no_relative_link(built, monkeypatch):
    monkeypatch.delenv("QREWARD_REPOSITORY", raising=False)
    metadata = built().core
    assert all(target.startswith("https:") for target in LINK.findall(metadata.readme))
    assert metadata.urls == {}


def test_with_an_address_every_link_leads_to_a_file_of_the_repository(built, monkeypatch):
    address = "https://git.example/team/qreward"
    monkeypatch.setenv("QREWARD_REPOSITORY", f"{address}/")
    metadata = built().core
    found = [target for target in LINK.findall(metadata.readme) if target.startswith(address)]
    assert len(found) > 20
    for target in [*found, metadata.urls["Documentation"], metadata.urls["Changelog"]]:
        kind, branch, path = target.removeprefix(f"{address}/").partition("#")[0].split("/", 2)
        assert kind in ("raw", "blob")
        assert branch == "main"
        assert (ROOT / path).is_file(), target


def test_the_version_stands_in_one_place(built):
    assert built().version == qreward_plugins.__version__
    assert f"## {qreward_plugins.__version__} - " in (ROOT / "CHANGELOG.md").read_text()
