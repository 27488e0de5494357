"""A tiny bench: the numbers it gives, and that they are the same again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import makespan
import pytest
from peers import POLICIES
from peers.results import CAP_S, Run, ratio_to
from peers.running import run

NEEDS = {"ours": "", "ours-warm": "", "slime": "", "curator": "", "tenacity": "tenacity"}
"""The policies that read no clock but the loop's, and what they need."""


@pytest.mark.parametrize("policy", NEEDS)
def test_a_policy_scores_everything_and_the_same_way_again(policy):
    if NEEDS[policy] and importlib.util.find_spec(NEEDS[policy]) is None:
        pytest.skip(f"{NEEDS[policy]} is not installed; see bench/requirements.txt")
    first, second = (run(policy, "errors", 32, 7) for _ in range(2))
    assert first == second
    assert first.unscored == 0
    assert first.calls >= 32
    assert 0 < first.makespan_s < CAP_S


def test_the_warm_batch_is_measured_from_its_own_start():
    cold, warm = run("ours", "streamed", 32, 1), run("ours-warm", "streamed", 32, 1)
    assert warm.bound_s == cold.bound_s
    assert warm.calls < 1.5 * cold.calls
    assert warm.makespan_s < 2 * cold.makespan_s


def test_how_many_times_ours_is_a_mean_over_scenarios():
    def a_run(policy, scenario, makespan_s):
        return Run(policy, scenario, 10, 0, makespan_s, 10.0, 0, 0, 10, 0, 0)

    ours = [a_run("ours", "equal", 10.0), a_run("ours", "errors", 100.0), a_run("ours", "tokens", 1.0)]
    assert ratio_to(ours, [a_run("slime", "equal", 30.0), a_run("slime", "errors", 100.0)]) == 2.0


def test_the_command_prints_a_table_and_writes_every_run(bench, tmp_path):
    policy = POLICIES["tenacity"].__class__("x", "X", "x", "X-package", "no_such_module.of_it")
    assert makespan.missing(policy) == "X-package is not installed"
    command = [sys.executable, str(bench / "makespan.py"), "--samples", "32", "--seeds", "2", "--scenarios", "equal"]
    policies = ["--policies", "ours", "slime", "--jobs", "2", "--json", str(tmp_path / "out.json")]
    done = subprocess.run([*command, *policies], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Makespan / bound of 32 samples" in done.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    kinds = {(run["policy"], run["seed"]) for run in written["runs"]}
    assert kinds == {(name, seed) for name in ("ours", "slime") for seed in (5000, 5001)}
    assert "64 connections" in written["policies"]["slime"]["set"]
    assert {row["policy"] for row in written["summary"]} == {"ours", "slime"}
