"""The metrics of the reward server, by the rules of `promtool check metrics`, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from qreward_plugins.observers import EngineStatistics
from qreward_plugins.observers.statistics import ReplicaStatistics, SourceGauges, Statistics
from qreward_plugins.server.exposition import exposition

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


@pytest.fixture
def text():
    """What the server tells of a source with two replicas and a budget, after a failed sample."""
    replica = dict.fromkeys(
        ("in_flight", "pending_tokens", "requests", "failures", "prompt_tokens", "cached_tokens"), 1
    )
    replicas = tuple(
        ReplicaStatistics(base_url=url, health="up", prefix_hit_rate=0.5, cache_use=None, **replica)
        for url in ("http://a", "http://b")
    )
    gauges = SourceGauges(
        state="up",
        in_flight=1,
        requests_share=None,
        tokens_share=None,
        paced=False,
        budget_left_usd=1.0,
        replicas=replicas,
    )
    now: EngineStatistics = Statistics().snapshot({"a": gauges}, waiting=0)
    object.__setattr__(now, "failed", {"infra/deadline": 1})
    return exposition(now, 1, Counter({("/score", 200): 1})).decode()


def test_the_dashboard_asks_for_metrics_that_are_there_with_labels_that_they_have(text):
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    labels = {sample.name: set(sample.labels) for sample in samples}
    board = json.loads(DASHBOARD.read_text())
    asked = set()
    for panel in board["panels"]:
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            expression = target["expr"]
            names = set(re.findall(r"qreward_\w+", expression))
            assert names <= labels.keys(), names - labels.keys()
            asked |= names
            grouped = {label for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(", ")}
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown == grouped <= set.union(*(labels[name] for name in names)), expression
            assert expression.count("(") == expression.count(")")
    assert len(asked) > 15
    (job,) = [each["query"] for each in board["templating"]["list"] if each["name"] == "job"]
    assert set(re.findall(r"qreward_\w+", job)) <= labels.keys()
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)
