"""What would help most is what the step waits for."""

from __future__ import annotations

import pytest


def changes(found) -> list[str]:
    return [advice.change for advice in found.advice]


def test_requests_that_are_spent_are_what_to_ask_for(tree, exact_plan):
    """Three windows of 60 + 6. With 60 more at a, two are enough; with 6 more at b, three are needed as before."""
    limits = {"requests_per_minute": 60, "concurrency": 64}
    config = tree(a=limits, b={**limits, "requests_per_minute": 6}, idle={"concurrency": 1})
    config["judges"]["quality"]["sources"] = ["a", "b"]
    found = exact_plan(config, 150, advise=True)
    assert found.step_s.p50 == pytest.approx(121, abs=2)
    assert found.bottleneck.resource == "requests"
    best = found.advice[0]
    assert best.change in ("+60 requests/min on a", "another source like a")
    assert best.step_s == pytest.approx(61, abs=2)
    assert best.saved_s == best.now_s - best.step_s
    assert not any(" on b" in change or "concurrency" in change or "idle" in change for change in changes(found))


def test_places_that_are_taken_are_what_to_ask_for(tree, exact_plan):
    config = tree(a={"requests_per_minute": 6000, "concurrency": 8})
    found = exact_plan(config, 64, latency_s={"a": 3.0}, advise=True)
    by_change = {advice.change: advice for advice in found.advice}
    assert set(by_change) == {"+8 concurrency on a", "another source like a"}
    assert by_change["+8 concurrency on a"].step_s == pytest.approx(found.step_s.p50 / 2, rel=0.1)


def test_workers_are_the_places_of_a_function(tree, exact_plan):
    config = {
        "sources": {"f": {"kind": "function", "function": "math:isclose", "workers": 4}},
        "judges": {"exact": {"kind": "function"}},
    }
    found = exact_plan(config, 64, advise=True)
    assert changes(found) == ["8 workers for f"]
    assert found.bottleneck.describes == "the places of f (its workers)"


def test_a_step_that_is_one_request_long_needs_no_advice(tree, exact_plan):
    found = exact_plan(tree(a={"concurrency": 64}), 16, advise=True)
    assert found.advice == ()
    assert found.bottleneck.resource == "latency"
