"""Plans of sources that take several samples in a request."""

from __future__ import annotations

import pytest

from qreward_plugins.cli.plan import _source_table
from qreward_plugins.samples import Scored, Verdict
from qreward_plugins.samples.spent import Spent

from ..kit import make_sample, record

CALL_S = 0.04
"""Seconds of a request of one call."""


def tree(batch=None, **limits):
    source = {"kind": "http", "url": "http://planned.invalid/score", "limits": limits or {"concurrency": 4}}
    return {"sources": {"rm": source | ({"batch": batch} if batch else {})}, "judges": {"j": {"kind": "function"}}}


@pytest.mark.parametrize(("places", "size"), [(1, 32), (4, 8)])
def test_a_plan_of_batches_is_that_of_the_step(exact_plan, places, size):
    config = tree({"max_size": size}, concurrency=places)
    found = exact_plan(config, 512, latency_s={"rm": CALL_S})
    # Half of a call's time is assumed to be the same for any number of calls in its request.
    assert found.step_s.p50 == pytest.approx(512 / size / places * CALL_S * (0.5 + 0.5 * size), rel=0.15)
    (use,) = found.sources
    assert use.calls_per_request == pytest.approx(size, rel=0.1)
    assert use.requests == pytest.approx(512 / size, rel=0.1)
    assert use.peak_in_flight == places
    assert found.attempts == 1.0
    assert "calls each" in [column.header for column in _source_table(found).columns]
    plain = exact_plan(tree(), 64, latency_s={"rm": CALL_S})
    assert plain.sources[0].calls_per_request == 1.0
    assert "calls each" not in [column.header for column in _source_table(plain).columns]


def test_a_request_counts_once_against_requests_per_minute(exact_plan):
    config = tree({"max_size": 32}, requests_per_minute=10, concurrency=4)
    found = exact_plan(config, 320, latency_s={"rm": CALL_S})
    assert found.sources[0].requests_used <= 1.0
    assert found.step_s.p50 < 61


def test_a_journal_does_not_say_how_many_calls_a_request_carried(exact_plan, tmp_path):
    scored = Scored(Verdict(1.0, judge="j", source="rm", service_s=9.0, spent=Spent(1, latency_s=9.0)))
    record(tmp_path / "journal.sqlite", [(make_sample(), scored)] * 20)
    engine = {"journal": {"path": str(tmp_path / "journal.sqlite")}}
    found = [
        exact_plan({**each, "engine": engine}, 8, latency_s={"x": 1.0}) for each in (tree(), tree({"max_size": 8}))
    ]
    assert [(plan.sources[0].latency_s, plan.sources[0].latency_from) for plan in found] == [
        (9.0, "journal"),
        (0.5, "assumed"),
    ]
