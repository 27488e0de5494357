"""What would help most is what the step waits for; sources that take several samples in a request are planned so."""

from __future__ import annotations

import pytest

from qreward_plugins.cli.plan import _source_table


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


def test_a_step_that_is_one_request_long_needs_no_advice(tree, exact_plan):
    found = exact_plan(tree(a={"concurrency": 64}), 16, advise=True)
    assert (found.advice, found.bottleneck.resource) == ((), "latency")


CALL_S = 0.04
"""Seconds of a request of one call."""


def batched(batch=None, **limits):
    source = {"kind": "http", "url": "http://planned.invalid/score", "limits": limits or {"concurrency": 4}}
    return {"sources": {"rm": source | ({"batch": batch} if batch else {})}, "judges": {"j": {"kind": "function"}}}


@pytest.mark.parametrize(("places", "size"), [(1, 32), (4, 8)])
def test_a_plan_of_batches_is_that_of_the_step(exact_plan, places, size):
    found = exact_plan(batched({"max_size": size}, concurrency=places), 512, latency_s={"rm": CALL_S})
    # Half of a call's time is assumed to be the same for any number of calls in its request.
    assert found.step_s.p50 == pytest.approx(512 / size / places * CALL_S * (0.5 + 0.5 * size), rel=0.15)
    (use,) = found.sources
    assert use.calls_per_request == pytest.approx(size, rel=0.1)
    assert use.requests == pytest.approx(512 / size, rel=0.1)
    assert (use.peak_in_flight, found.attempts) == (places, 1.0)
    assert "calls each" in [column.header for column in _source_table(found).columns]
    plain = exact_plan(batched(), 64, latency_s={"rm": CALL_S})
    assert plain.sources[0].calls_per_request == 1.0
