"""The pages of names list what the code emits: metrics, and the columns of the journal."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import get_args

from opentelemetry.sdk.metrics import MeterProvider

from qreward_plugins.journal.entries import COLUMNS
from qreward_plugins.observers import SourceGauges, Statistics
from qreward_plugins.observers.batch_report import PartKind
from qreward_plugins.observers.facts import Facts, summary
from qreward_plugins.observers.opentelemetry import OpenTelemetry
from qreward_plugins.observers.statistics import ReplicaStatistics
from qreward_plugins.samples import Scored, Verdict
from qreward_plugins.server.exposition import exposition
from verl_adapter.metrics import RewardLog

DOCS = Path(__file__).parents[2] / "docs"
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


def test_every_metric_of_opentelemetry(monkeypatch):
    made = {}
    meter = MeterProvider().get_meter("names")
    for kind in ("counter", "histogram", "up_down_counter"):
        create = getattr(meter, f"create_{kind}")

        def noted(name, *given, kind=kind, create=create):
            made[name] = kind.replace("up_down", "up-down").replace("_", " ")
            return create(name, *given)

        monkeypatch.setattr(meter, f"create_{kind}", noted)

    class Provider(MeterProvider):
        def get_meter(self, *given, **named):
            return meter

    OpenTelemetry(Provider())
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
    root = DOCS.parent
    folders = ("qreward_plugins", "verl_adapter", "slime_adapter", "roll_adapter", "hydra_plugins")
    files = [path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    read = {name for path in files for name in re.findall(r"\bQREWARD_[A-Z_]+\b", path.read_text())}
    listed = set(re.findall(r"`(QREWARD_[A-Z_]+)`", (DOCS / "keys.md").read_text()))
    assert listed == read


def test_every_place_to_look_at_is_there():
    page = (DOCS.parent / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| [^|]+\? \| `([^`]+)` \| `(\w+)` \|$", page, re.M)
    assert len(rows) == page.partition("## Where to look")[2].partition("\n## ")[0].count("\n| ") - 1 > 0
    for file, name in rows:
        code = (DOCS.parent / file).read_text()
        assert re.search(rf"^ *(async )?(def|class) {name}\b", code, re.M), f"{file} defines no {name}"
