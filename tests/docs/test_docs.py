"""The site is built from `docs/` without a warning, what its pages list is what the code has, and a package index shows
a README whose links work there.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import get_args
from unittest.mock import MagicMock

import pytest
import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from mkdocs.commands.build import build
from mkdocs.config import load_config

import qreward_plugins
from qreward_plugins.cli.app import COMMANDS
from qreward_plugins.config import Config
from qreward_plugins.config.registry import rooms
from qreward_plugins.journal.entries import COLUMNS
from qreward_plugins.observers import SourceGauges, Statistics
from qreward_plugins.observers.batch_report import PartKind
from qreward_plugins.observers.facts import Facts, summary
from qreward_plugins.observers.opentelemetry import OpenTelemetry
from qreward_plugins.observers.statistics import ReplicaStatistics
from qreward_plugins.samples import Scored, Verdict
from qreward_plugins.server.exposition import exposition
from verl_adapter.metrics import RewardLog

from ..kit import scripts

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
def tools():
    with scripts(ROOT / "scripts", "configuration_keys", "reference_pages") as found:
        yield found


def test_pages_that_are_written_from_the_code_are_up_to_date(tools):
    for name in tools.reference_pages.PAGES:
        text = (ROOT / "docs" / name).read_text()
        assert text == tools.reference_pages.current(text), "run `python scripts/reference_pages.py`"


def test_every_number_of_the_configuration_has_a_unit(tools):
    """A new one needs an entry in scripts/configuration_keys.py, unless its name says its unit."""
    hook = tools.configuration_keys

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


# The lists of names in the pages are those of the code


DOCS = ROOT / "docs"
LISTED = set(re.findall(r"`([^`\n]+)`", (DOCS / "metrics.md").read_text()))


def test_every_metric_of_a_step_and_every_fact_of_a_sample():
    facts = Facts(["clarity"], defines_correct=True)
    row = facts.of(Scored(Verdict(1.0, {"clarity": 1.0}, correct=True, judge="j", source="a")), "d")
    assert {name.replace("score/clarity", "score/NAME") for name in row} <= LISTED
    assert {_placed(name) for name in summary([row, row], ["g", "g"])} <= LISTED


def _placed(name):
    """A metric as the page writes it."""
    for of_one, placed in (
        ("score/clarity", "score/NAME"),
        ("source_share/a", "source_share/SOURCE"),
        ("blame_s/a/queue", "blame_s/SOURCE/PART"),
        ("data/d/", "data/DATA_SOURCE/"),
    ):
        name = name.replace(of_one, placed)
    return name


def test_every_metric_of_verl():
    facts = Facts([], defines_correct=True).of(Scored(Verdict(1.0, correct=True, judge="j", source="a")), "d")
    info = {f"qreward/{name}": value for name, value in facts.items()}
    log = RewardLog()
    log.add("train", [("u", info | {"qreward/waited": '{"blame_s/a/queue": 1.0}'})])
    log.add("val", [("u", info)])
    names = {name.removeprefix("qreward/") for name in log.since_last()}
    assert {"blame_s/a/queue", "val/unscored_prompts"} <= names
    assert {_placed(name.removeprefix("val/")) for name in names} <= LISTED


def test_every_metric_of_prometheus():
    numbers = dict.fromkeys((field.name for field in dataclasses.fields(ReplicaStatistics)), 0)
    replica = ReplicaStatistics(**numbers | {"base_url": "http://a", "health": "up"})
    gauges = SourceGauges(
        state="up", in_flight=0, requests_share=None, tokens_share=None, paced=False, replicas=(replica,)
    )
    text = exposition(Statistics().snapshot({"a": gauges}, waiting=0), 0, Counter({("/score", 200): 1})).decode()
    emitted = {name.removesuffix("_total"): kind for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M)}
    rows = re.findall(r"^\| (`qreward_[^|]+) \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.M)
    assert {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)} == emitted


def test_every_metric_of_opentelemetry():
    OpenTelemetry(provider := MagicMock())
    created = [(name.partition("create_")[2], given) for name, given, _ in provider.get_meter.return_value.method_calls]
    made = {given[0]: kind.replace("up_down", "up-down").replace("_", " ") for kind, given in created if kind}
    rows = re.findall(r"^\| `(qreward\.[\w.]+)` \| ([\w -]+?) \|", (DOCS / "metrics.md").read_text(), re.M)
    assert dict(rows) == made


def test_the_parts_of_a_wait():
    text = (DOCS / "planning.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.M)) == set(get_args(PartKind))


def test_the_columns_of_the_journal():
    table = (DOCS / "journal.md").read_text().partition("\n| column | meaning |")[2].partition("\n\n")[0]
    columns = [name for names in re.findall(r"^\| (`[^|]+) \|", table, re.M) for name in re.findall(r"`(\w+)`", names)]
    assert sorted(columns) == sorted(["id", *COLUMNS])


def test_the_variables_of_the_environment():
    folders = ("qreward_plugins", "verl_adapter", "slime_adapter", "roll_adapter", "hydra_plugins")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    read = {name for path in files for name in re.findall(r"\bQREWARD_[A-Z_]+\b", path.read_text())}
    listed = set(re.findall(r"`(QREWARD_[A-Z_]+)`", (DOCS / "keys.md").read_text()))
    assert listed == read


def test_every_place_to_look_at_is_there():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| [^|]+\? \| `([^`]+)` \| `(\w+)` \|$", page, re.M)
    assert len(rows) == page.partition("## Where to look")[2].partition("\n## ")[0].count("\n| ") - 1 > 0
    for file, name in rows:
        code = (ROOT / file).read_text()
        assert re.search(rf"^ *(async )?(def|class) {name}\b", code, re.M), f"{file} defines no {name}"


# What a package index shows: the README with links that work there, the project's URLs, the version


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
