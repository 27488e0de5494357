"""The site is built from `docs/` without a warning, and what it lists is what the code has."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config

import qreward_plugins
from qreward_plugins.cli.app import COMMANDS
from qreward_plugins.config import Config
from qreward_plugins.config.registry import rooms

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site. A warning of the build is an error."""
    folder = tmp_path_factory.mktemp("site")
    depth = sys.getrecursionlimit()
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    try:
        build(config)
        yield folder
    finally:
        # mkdocstrings raises Python's default, which bounds the nesting of files in other tests.
        sys.setrecursionlimit(depth)
        config.plugins.on_shutdown()
        logging.getLogger("mkdocs").handlers.clear()
        shutil.rmtree(folder)


def page(site, name):
    return (site / name / "index.html").read_text()


def ids(text):
    return set(re.findall(r'\bid="?([^"\s>]+)', text))


def test_every_page_is_in_the_navigation():
    def named(item):
        below = item.values() if isinstance(item, dict) else item
        return {item} if isinstance(item, str) else {uri for one in below for uri in named(one)}

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= named(nav)


def test_the_site_loads_nothing_from_other_hosts(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?(https?:[^\"\s>]+)", path.read_text()
        )
        assert not loaded, path


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(ROOT / "scripts"))
    import configuration_keys
    import reference_pages

    yield SimpleNamespace(keys=configuration_keys, pages=reference_pages)
    sys.path.remove(str(ROOT / "scripts"))


def test_pages_that_are_written_from_the_code_are_up_to_date(scripts):
    for name in scripts.pages.PAGES:
        text = (ROOT / "docs" / name).read_text()
        assert text == scripts.pages.current(text), "run `python scripts/reference_pages.py`"


def test_every_number_of_the_configuration_has_a_unit(scripts):
    """A new one needs an entry in scripts/configuration_keys.py, unless its name says its unit."""
    hook = scripts.keys

    def numbers(node):
        for one in hook.choices(node):
            for name, below in one.get("properties", {}).items():
                yield from [name] if hook.is_number(below) else []
                yield from numbers(below)
            for below in (one.get("items"), one.get("additionalProperties")):
                if isinstance(below, dict):
                    yield from numbers(below)

    models = [Config, *(kind.Config for kinds in rooms.values() for _, kind in kinds.loadable())]
    found = {name for model in models for name in numbers(hook.shape_of(model))}
    assert len(found) > 50
    assert {name for name in found if hook.unit_of(name) is None} == set()
    assert set(hook.UNITS) - found == set()


def test_every_command_has_its_section_with_its_options():
    text = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in COMMANDS if f"## `{name}`\n" not in text or f"<!-- options: {name} -->" not in text] == []


def test_every_public_name_is_on_the_page_of_the_api(site):
    text = page(site, "api")
    names = {one.rpartition(".")[2] for one in ids(text)}
    unlisted = set(qreward_plugins.__all__) - names - {"__version__", "Config"}
    assert all(f"<code>{name}</code>" in text for name in unlisted), unlisted
    assert unlisted <= {"Event", "Outcome", "Split"}
