"""What a step takes, costs and waits for."""

from __future__ import annotations

import logging

import pytest

from qreward_plugins import InputError
from qreward_plugins.planning import Lengths, plan, prediction
from qreward_plugins.system.processes import process_pool

from ..kit import each_of, make_sample


def test_places_bound_a_step_without_limits(tree, exact_plan):
    found = exact_plan(tree(a={"concurrency": 10}), 100, latency_s={"a": 2.0})
    assert found.step_s.p50 == pytest.approx(20, rel=0.1)
    assert found.bottleneck.resource == "places"
    assert found.bottleneck.describes == "concurrency of a"
    use = found.sources[0]
    assert (use.peak_in_flight, use.requests) == (10, 100)
    assert use.out_of_places > 0.8


def test_tokens_bound_a_step_whose_requests_are_plenty(tree, exact_plan):
    limits = {"tokens_per_minute": 60_000, "requests_per_minute": 6000, "concurrency": 64}
    found = exact_plan(tree(a=limits), 120, tokens=600)
    assert found.cost_usd is None, "prices that are not given are not zero"
    assert found.step_s.p50 > 60
    assert (found.bottleneck.resource, found.bottleneck.describes) == ("tokens", "tokens a minute of a")
    assert 0.9 < found.sources[0].tokens_used <= 1.0


def test_the_cost_is_what_one_calculates_by_hand(tree, exact_plan):
    """128 requests at a fixed price, with a verdict of 50 tokens each and prompts of one size."""
    price = {"per_request": 0.001, "input_per_million": 2.0, "output_per_million": 10.0}
    found = exact_plan(tree(source={"price": price}, a={"concurrency": 64}), 128, verdict_tokens=50)
    (sized,) = {bar.tokens for bar in found.timeline.bars}
    by_hand = 128 * (0.001 + (sized - 50) * 2e-6 + 50 * 1e-5)
    assert found.cost_usd.p50 == pytest.approx(by_hand, rel=1e-9)
    assert found.sources[0].cost_usd == pytest.approx(by_hand, rel=1e-9)
    assert sized - 50 > 300  # the question, the rollout, and the judge's own words


def test_a_step_is_rehearsed_by_judge_and_data_source(tree, exact_plan):
    config = tree(model={"concurrency": 8}, judge={"criteria": {"clarity": "is it clear?"}, "score_range": [1, 5]})
    config["sources"]["rules"] = {"kind": "function", "function": "math:isclose", "workers": 2}
    config["judges"]["exact"] = {"kind": "function", "components": ["acc"], "reward_range": [-1, 1]}
    config["routes"] = {"math/*": "exact", "code/[ab]?": "quality"}
    both = exact_plan(config, 60, data_sources=[("math/gsm", 3.0), ("code/a1", 1.0)], latency_s={"*": 0.5})
    assert set(both.judged) == {"exact", "quality"}
    assert both.judged["exact"] > 2 * both.judged["quality"]
    assert both.failed == {}
    used = {use.name: use for use in both.sources}
    assert (used["rules"].concurrency, used["rules"].peak_in_flight) == (2, 2)
    first = exact_plan(config, 8)
    assert first.judged == {"exact": 8}
    assert first.notes[-1] == "model: not asked, because no judge of these samples uses it"


def test_a_scoring_service_is_planned_with_its_limits_and_without_verdicts_in_words(exact_plan):
    source = {"kind": "http", "url": "http://planned.invalid/score", "limits": {"concurrency": 64}}
    source |= {"price": {"input_per_million": 2.0, "output_per_million": 1000.0}}
    judges = {"rm": {"kind": "function", "components": ["style"], "reward_range": [-1, 1]}}
    config = {"sources": {"rm": source}, "judges": judges}
    found = exact_plan(config, 150, tokens=100)
    assert found.failed == {}
    (sized,) = {bar.tokens for bar in found.timeline.bars}
    assert sized >= 300  # the question and the rollout
    assert found.cost_usd.p50 == pytest.approx(150 * sized * 2e-6, rel=1e-9)
    assert plan(config, samples=8, seeds=1, advise=False).sources[0].latency_s == 0.5


def test_samples_that_nobody_judges_are_an_error_that_names_the_routes(tree, exact_plan):
    config = {**tree(a={}), "routes": {"math/*": "quality"}}
    with pytest.raises(InputError, match=r"no route matches the data source 'code'; routes: math/\*"):
        exact_plan(config, 8, data_sources=[("code", 1.0)])


@each_of(
    ("judge", "why"),
    [
        ({"reference": {"extract": "boxed"}}, "no ground truth"),
        ({"show": {"response": "answer", "extract": "boxed"}}, "no answer where `extract` looks"),
    ],
)
def test_a_judge_that_asks_nothing_of_made_up_texts_asks_for_real_rollouts(tree, exact_plan, judge, why):
    config = tree(a={}, judge=judge)
    with pytest.raises(
        InputError, match=rf"samples cannot be scored: .*{why}.*; give real rollouts with --tokens file"
    ):
        exact_plan(config, 8)
    rollout = make_sample(ground_truth="4", response=r"It is \boxed{4}.")
    assert exact_plan(config, 8, lengths=Lengths(rollouts=(rollout,))).sources[0].requests == 8


def test_nothing_of_a_rehearsal_is_logged(tree, exact_plan, caplog):
    with caplog.at_level(logging.DEBUG, logger="qreward_plugins"):
        exact_plan({**tree(a={"concurrency": 1}), "engine": {"deadline_s": 1}}, 8, errors=0.5)
    assert caplog.records == []
    logging.getLogger("qreward_plugins.engine").warning("in earnest")
    assert [record.message for record in caplog.records] == ["in earnest"]


def test_judges_that_ask_about_several_things_are_planned(tree, exact_plan):
    """A rank scores lists of a group, and a test of a program is a request."""
    config = tree(a={"concurrency": 64})
    config["sources"]["box"] = {"kind": "sandbox", "url": "http://planned.invalid/run_code"}
    config["judges"] |= {"ranked": {"kind": "rank", "judge": "quality"}, "code": {"kind": "code", "sources": "box"}}
    config["routes"] = {"prose": "ranked", "code": "code"}
    tests = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}
    program = make_sample(data_source="code", ground_truth=tests, response="```python\nprint(input())\n```")
    found = exact_plan(config, 16, lengths=Lengths(rollouts=(program,)))
    assert ({use.name: use.requests for use in found.sources}, found.failed) == ({"a": 0, "box": 48}, {})
    texts = [make_sample(data_source="prose", group_id="g", response=f"{number}") for number in range(16)]
    found = exact_plan(config, 16, lengths=Lengths(rollouts=tuple(texts)))
    assert (found.sources[0].requests, found.failed) == (3, {})


def test_every_part_of_a_sum_takes_its_requests(tree, exact_plan):
    """Two language judges of unlike scales over `a`, a scoring service, and their sum; none is a retry or a hedge."""
    config = tree(a={"concurrency": 10})
    config["sources"]["rm"] = {"kind": "http", "url": "http://planned.invalid/score"}
    config["judges"] = {
        "quality": {"kind": "llm", "criteria": {"proof": "Is it proven?"}},
        "style": {"kind": "llm", "score_range": [-5, -1], "instructions": "How is it written? " * 50},
        "rules": {"kind": "function", "components": ["tags"], "reward_range": [3, 4]},
        "total": {"kind": "sum", "weights": {"quality": 1, "style": 0.5, "rules": -0.1}},
    }
    found = exact_plan(config, 50, latency_s={"a": 2.0, "rm": 1.0})
    used = {use.name: use.requests for use in found.sources}
    assert (used, found.attempts) == ({"a": 100, "rm": 50}, 3.0)
    assert (found.judged, found.failed, found.late) == ({"total": 50}, {}, 0.0)
    assert found.step_s.p50 == pytest.approx(20, rel=0.1)


def test_processes_change_nothing(tree, monkeypatch):
    monkeypatch.setattr(prediction, "WORTH_PROCESSES", 0)
    monkeypatch.setattr(prediction, "process_pool", lambda _: process_pool(1))  # the second one would only be slower
    config = tree(a={"concurrency": 64})
    done = []
    apart = plan(config, samples=24, seeds=2, advise=False, processes=2, progress=lambda *far: done.append(far))
    assert apart.to_dict() == plan(config, samples=24, seeds=2, advise=False).to_dict()
    assert (done[0], done[-1]) == ((0, 2), (2, 2))


def test_workers_share_the_limits(tree, exact_plan):
    """30 requests a minute of 45 samples, over three engines."""
    found = exact_plan(tree(a={"requests_per_minute": 30, "concurrency": 16}), 45, workers=3)
    assert found.step_s.p50 == pytest.approx(61.5, abs=1.0)
    assert (found.sources[0].requests, found.sources[0].requests_used) == (45, 1.0)
