"""The benches with few samples: the numbers they give, that they are the same again, and what peers meet in place of a
network.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys

import batching
import judging
import learned_limits
import makespan
import pytest
import routing
from peers import POLICIES, running
from peers.results import CAP_S, Run, ratio_to
from peers.stage import HTTPFailure, NetworkFailure, Stage, weighted_cycle

from qreward_plugins.simulation import Fault, run, scenario, score_of

from ..kit import each_of

NEEDS = {"ours": "", "ours-warm": "", "slime": "", "curator": "", "tenacity": "tenacity"}
"""The policies that read no clock but the loop's, and what they need."""


@pytest.mark.parametrize("policy", NEEDS)
def test_a_policy_scores_everything_and_the_same_way_again(policy):
    if NEEDS[policy] and importlib.util.find_spec(NEEDS[policy]) is None:
        pytest.skip(f"{NEEDS[policy]} is not installed; see bench/requirements.txt")
    first, second = (running.run(policy, "errors", 32, 7) for _ in range(2))
    assert first == second
    assert first.unscored == 0
    assert first.calls >= 32
    assert 0 < first.makespan_s < CAP_S


def test_the_warm_batch_is_measured_from_its_own_start():
    cold, warm = running.run("ours", "streamed", 32, 1), running.run("ours-warm", "streamed", 32, 1)
    assert warm.bound_s == cold.bound_s
    assert warm.calls < 1.5 * cold.calls
    assert warm.makespan_s < 2 * cold.makespan_s


def test_how_many_times_ours_is_a_mean_over_scenarios():
    def a_run(policy, scenario, makespan_s):
        return Run(policy, scenario, 10, 0, makespan_s, 10.0, 0, 0, 10, 0, 0)

    ours = [a_run("ours", "equal", 10.0), a_run("ours", "errors", 100.0), a_run("ours", "tokens", 1.0)]
    assert ratio_to(ours, [a_run("slime", "equal", 30.0), a_run("slime", "errors", 100.0)]) == 2.0


def test_the_command_prints_a_table_and_writes_every_run(tmp_path):
    policy = POLICIES["tenacity"].__class__("x", "X", "x", "X-package", "no_such_module.of_it")
    assert makespan.missing(policy) == "X-package is not installed"
    command = [sys.executable, makespan.__file__, "--samples", "32", "--seeds", "2", "--scenarios", "equal"]
    policies = ["--policies", "ours", "slime", "--jobs", "2", "--json", str(tmp_path / "out.json")]
    done = subprocess.run([*command, *policies], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Makespan / bound of 32 samples" in done.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    kinds = {(run["policy"], run["seed"]) for run in written["runs"]}
    assert kinds == {(name, seed) for name in ("ours", "slime") for seed in (5000, 5001)}
    assert "64 connections" in written["policies"]["slime"]["set"]
    assert {row["policy"] for row in written["summary"]} == {"ours", "slime"}


# Routing between replicas, with few questions


@pytest.mark.parametrize(
    ("load", "most"),
    [
        *((load, 1.05) for load in ("groups", "shuffled", "all_at_once")),
        *((load, 1.02) for load in ("8_processes", "8_rows", "8_drawn")),  # which send the groups
        ("no_question", 1.05),  # a prompt that all share
    ],
)
def test_groups_use_the_caches_as_one_replica_would_and_take_no_longer(load, most):
    least, ours = routing.measure(load, 8, ["least_requests", "prefix_aware"], 0)
    assert ours.bound_s <= ours.makespan_s <= most * least.makespan_s
    if load != "no_question":
        assert ours.hit_share >= 0.95 > least.hit_share
        assert ours.computed < 0.75 * least.computed


def test_it_measures_and_writes_what_it_shows(tmp_path, capsys, monkeypatch):
    loads = {name: routing.replace(load, questions=48) for name, load in routing.LOADS.items()}
    monkeypatch.setattr(routing, "LOADS", loads)
    path = tmp_path / "out.json"
    assert routing.main(["--replicas", "2", "--load", "gateways", "groups", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [one["policy"] for one in found] == 2 * list(routing.POLICIES)
    assert all(one["makespan_s"] >= one["bound_s"] for one in found)
    assert "tree (sglang)" in capsys.readouterr().out


# Requests with several calls, and ways to judge


def written(bench, path, monkeypatch, *words):
    """What a bench writes."""
    monkeypatch.setattr("sys.argv", ["bench.py", *words, "--json", str(path)])
    bench.main()
    return json.loads(path.read_text())


def test_full_requests_are_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(batching, "SETTINGS", batching.SETTINGS[:2])
    found = written(batching, tmp_path / "out.json", monkeypatch, "--samples", "200")
    assert [one["policy"] for one in found] == ["ours", "single", "timer"] * 2
    ours, single, timer = found[:3]
    assert ours["samples_per_s"] > 2 * single["samples_per_s"]
    assert ours["wait_p50_s"] < timer["wait_p50_s"]
    assert (ours["requests"], single["requests"]) == (4, 200)


def test_at_little_load_nothing_is_slower_than_one_by_one():
    setting = batching.Setting("little load", 0.02, 0.002, 1, over_s=10.0)
    ours, single = (run(batching.simulated(setting, policy, 100)) for policy in ("ours", "single"))
    assert ours[1] == pytest.approx(single[1])


def test_every_policy_scores_all_samples_and_decided_groups_cost_nothing(tmp_path, monkeypatch, capsys):
    rows = written(judging, tmp_path / "out.json", monkeypatch, "--prompts", "16")
    assert "gate, rank" in capsys.readouterr().out
    found = {one["policy"]: one for one in rows}
    assert set(found) == set(judging.POLICIES)
    assert {one["scored"] for one in rows} == {128}
    assert (found["judge"]["calls"]["large"], found["rank"]["calls"]["large"]) == (128, 16)
    # Groups that are all wrong are not asked about; those with one right answer are, about that.
    assert found["gate, rank"]["calls"]["large"] == pytest.approx(16 * (1 - found["gate, rank"]["flat"]), abs=2)
    assert found["gate, rank"]["usd"] < 0.4 * found["judge"]["usd"]


# Workers that share an undeclared limit learn it together


@pytest.mark.parametrize(("says", "workers"), [("Retry-After", 8), ("neither", 4)])
def test_workers_learn_an_undeclared_limit_with_hardly_more_429s_than_one(says, workers):
    one, several = (run(learned_limits.play(says, count, minutes=4)) for count in (1, workers))
    assert sum(several.rejected) <= 1.5 * max(4, sum(one.rejected))
    assert several.rate >= 0.9 * learned_limits.PER_MINUTE
    if says == "Retry-After":
        assert all(rejected <= 3 for rejected in several.rejected[2:]), "one worker at a time probes what is learned"


# What peers meet in place of a network


def a_stage(**server):
    """A stage with one server that answers as it is told to."""
    made = scenario("equal", samples=8)
    plain = {"error_share": 0.0, "requests_per_minute": None, "concurrency": None, **server}
    return Stage(dataclasses.replace(made, servers=(dataclasses.replace(made.servers[0], **plain),)))


def test_an_answer_holds_the_sample_s_score():
    stage = a_stage()
    item = stage.items[3]
    answer = run(stage.ask("a", item))
    assert (answer.score, answer.prompt_tokens) == (score_of(item.id), item.prompt_tokens)
    assert stage.counts() == (1, 0, 0)
    with pytest.raises(ValueError, match="Expecting value"):
        _ = run((refusing := a_stage(invalid_share=1.0)).ask("a", refusing.items[0])).score
    assert "".join(itertools.islice(weighted_cycle({"a": 2, "b": 1}), 9)) == "abaabaaba"
    # All policies send what the engine sends.
    assert all(stage.item_of(list(item.messages)) is item for item in stage.items)
    assert sum(item.prompt_tokens + item.completion_tokens for item in stage.items) / 8 == stage.mean_tokens


@each_of(
    ("server", "what", "status", "waits", "counts"),
    [
        ({"requests_per_minute": 1}, HTTPFailure, 429, True, (2, 1, 0)),
        # A limit that nobody told of is counted apart.
        ({"requests_per_minute": 1, "declared": False}, HTTPFailure, 429, True, (2, 0, 1)),
        ({"error_share": 1.0}, HTTPFailure, 500, False, (2, 0, 0)),
        ({"faults": (Fault(0.0, 60.0, "refuse"),)}, NetworkFailure, None, False, (2, 0, 0)),
        ({"faults": (Fault(0.0, 600.0, "hang"),)}, asyncio.TimeoutError, None, False, (2, 0, 0)),
    ],
)
def test_what_a_policy_meets(server, what, status, waits, counts):
    stage = a_stage(**server)

    async def two():
        asking = (stage.ask("a", item, timeout_s=7.0) for item in stage.items[:2])
        answers = await asyncio.gather(*asking, return_exceptions=True)
        return next(answer for answer in answers if isinstance(answer, Exception))

    failure = run(two())
    assert type(failure) is what
    assert (getattr(failure, "status", None), stage.counts()) == (status, counts)
    if status is not None:
        assert (failure.retry_after is not None) is waits
    if waits:
        assert failure.retry_after.isdigit()
        assert 1 <= failure.retry_after_s <= 60


def test_faults_move_to_where_the_measured_batch_starts():
    made = scenario("dies-hanging", samples=64)
    before, after = Stage(made), Stage(made, starts_at_s=600.0)
    fault, moved = (stage.servers["a"].server.faults[0] for stage in (before, after))
    assert moved.start_s == fault.start_s + 600.0
    assert after.scenario.bound_s() == before.scenario.bound_s()
