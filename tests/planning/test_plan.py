"""What a step takes, costs and waits for; what would help; what people write, and the picture."""

from __future__ import annotations

import importlib.util
import json
import logging
import random
from statistics import fmean

import pytest

from qreward_plugins import InputError, load_config
from qreward_plugins.cli.plan import _source_table
from qreward_plugins.planning import Lengths, plan, prediction
from qreward_plugins.planning.picture import draw_timeline, rows
from qreward_plugins.planning.rollouts import default_data_source, parse_lengths
from qreward_plugins.planning.setting import parse_data_source, parse_latency
from qreward_plugins.system.processes import process_pool

from ..kit import each_of, make_sample


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
    config["sources"]["rules"] = {"kind": "function", "function": "builtins:dict", "workers": 2}
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


# What would help most; sources that take several samples in a request


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
    tried = " ".join(advice.change for advice in found.advice)
    assert not any(word in tried for word in (" on b", "concurrency", "idle"))


def test_places_that_are_taken_bound_a_step_and_are_what_to_ask_for(tree, exact_plan):
    config = tree(a={"requests_per_minute": 6000, "concurrency": 8})
    found = exact_plan(config, 64, latency_s={"a": 3.0}, advise=True)
    assert found.step_s.p50 == pytest.approx(24, rel=0.1)
    assert (found.bottleneck.resource, found.bottleneck.describes) == ("places", "concurrency of a")
    use = found.sources[0]
    assert (use.peak_in_flight, use.requests, use.out_of_places > 0.8) == (8, 64, True)
    by_change = {advice.change: advice for advice in found.advice}
    assert set(by_change) == {"+8 concurrency on a", "another source like a"}
    assert by_change["+8 concurrency on a"].step_s == pytest.approx(found.step_s.p50 / 2, rel=0.1)


def test_a_step_that_is_one_request_long_needs_no_advice(tree, exact_plan):
    found = exact_plan(tree(a={"concurrency": 64}), 16, advise=True)
    assert (found.advice, found.bottleneck.resource) == ((), "latency")


def batched(batch=None, **limits):
    source = {"kind": "http", "url": "http://planned.invalid/score", "limits": limits or {"concurrency": 4}}
    return {"sources": {"rm": source | ({"batch": batch} if batch else {})}, "judges": {"j": {"kind": "function"}}}


@pytest.mark.parametrize(("places", "size"), [(1, 32), (4, 8)])
def test_a_plan_of_batches_is_that_of_the_step(exact_plan, places, size):
    found = exact_plan(batched({"max_size": size}, concurrency=places), 512, latency_s={"rm": 0.04})
    # Half of a call's time is assumed to be the same for any number of calls in its request.
    assert found.step_s.p50 == pytest.approx(512 / size / places * 0.04 * (0.5 + 0.5 * size), rel=0.15)
    (use,) = found.sources
    assert use.calls_per_request == pytest.approx(size, rel=0.1)
    assert use.requests == pytest.approx(512 / size, rel=0.1)
    assert (use.peak_in_flight, found.attempts) == (places, 1.0)
    assert "calls each" in [column.header for column in _source_table(found).columns]
    plain = exact_plan(batched(), 64, latency_s={"rm": 0.04})
    assert plain.sources[0].calls_per_request == 1.0


# Lengths, latencies and data sources as people write them


def test_lengths_are_read():
    assert parse_lengths("800", most=1) == Lengths(800, 0.0)
    assert parse_lengths("lognormal:500:0.9", most=1) == Lengths(500, 0.9)
    drawn = parse_lengths("lognormal:500:0.9", most=1).draw(20_000, random.Random(1))
    assert fmean(drawn) == pytest.approx(500, rel=0.04)
    for text in ("many", "normal:3:4", "lognormal:1:2:3", "0", "nan"):
        with pytest.raises(InputError, match="--tokens"):
            parse_lengths(text, most=1)


def test_rollouts_come_from_a_file_with_their_lengths_and_data_sources(tmp_path, tree, exact_plan):
    path = tmp_path / "rollouts.jsonl"
    rows = [{"prompt": "?", "response": "word " * n, "data_source": f"d{n % 2}"} for n in range(1, 41)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = parse_lengths(f"file:{path}", most=10)
    assert len(lengths.rollouts) == 10
    assert {sample.response for sample in lengths.rollouts} <= {row["response"] for row in rows}
    config = {**tree(a={"concurrency": 8}), "routes": {"d0": "quality"}}
    found = exact_plan(config, 64, lengths=lengths)
    assert 0 < found.judged["quality"] < 64
    assert found.failed["infra/no_route"] == pytest.approx(1 - found.judged["quality"] / 64)
    assert any("data source that no route matches, e.g. 'd1'" in note for note in found.notes)


def test_latencies_are_read(tree):
    config = load_config(tree(a={}, b={}))
    assert parse_latency("3", config) == {"*": 3.0}
    assert parse_latency("a=2, b=0.5", config) == {"a": 2.0, "b": 0.5}
    assert parse_latency("a=2,5", config) == {"a": 2.0, "*": 5.0}
    with pytest.raises(InputError, match="'soon' is no number of seconds"):
        parse_latency("a=soon", config)
    assert parse_data_source("math/gsm8k=0.7") == ("math/gsm8k", 0.7)
    assert parse_data_source("a=b") == ("a=b", 1.0)


@each_of(
    ("routes", "name"),
    [({"math/*": "quality", "*": "quality"}, "*"), ({"math/g?": "quality"}, "math/g?"), ({}, "")],
)
def test_a_data_source_is_made_up_for_the_route(tree, routes, name):
    assert default_data_source(load_config({**tree(a={}), "routes": routes})) == name
    with pytest.raises(InputError, match="--data-source"):
        default_data_source(load_config({**tree(a={}), "routes": {"math/[gs]": "quality"}}))


# The timeline and its picture


def test_the_timeline_holds_every_attempt_of_the_step_and_no_other(tree, exact_plan):
    found = exact_plan(tree(a={"concurrency": 4}, b={"concurrency": 4}), 64, errors=0.2)
    timeline = found.timeline
    assert len(timeline.bars) == round(found.attempts * 64)
    assert sum(bar.end == "answered" for bar in timeline.bars) == 64
    assert any(bar.end == "failed" for bar in timeline.bars)
    assert all(0 <= bar.start_s <= bar.end_s <= timeline.makespan_s for bar in timeline.bars)
    assert max(rows(timeline.of("a"))) == 3


@pytest.fixture
def timeline(tree, exact_plan):
    limits = {"requests_per_minute": 30, "tokens_per_minute": 100_000, "concurrency": 8}
    return exact_plan(tree(a=limits, **{"$odd_name$": {}}), 90, errors=0.1).timeline


def test_a_picture_is_drawn(timeline, tmp_path):
    """As text, which SVG keeps: one band for each source that was asked, the makespan, and what the colours mean."""
    import matplotlib

    path = tmp_path / "plan.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_timeline(timeline, path, title="90 samples", subtitle="most of it: quota")
    text = path.read_text()
    for words in ("90 samples", "most of it: quota", ">a<", "odd_name", "failed", "rewards in"):
        assert words in text
    assert f"{timeline.makespan_s:.1f} s" in text
    # Every bar is a box of its own, in the colour of its end.
    assert text.count("fill: #3d7ea6") >= 1
    assert text.count("<use ") + text.count("<path ") > len(timeline.bars)


def test_a_picture_that_cannot_be_drawn_is_refused(timeline, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"plan\.bmp2: a picture ends with \.pdf, \.png, \.svg"):
        draw_timeline(timeline, tmp_path / "plan.bmp2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'pip install "qreward-plugins\[plot\]"'):
        draw_timeline(timeline, tmp_path / "plan.png")
