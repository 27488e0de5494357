"""A user's function that hangs on some samples, or dies of them: the others are scored, through the front door."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from qreward_plugins import RewardEngine, Sample, Scored

FUNCTION = """
import asyncio, os, time


def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str.startswith("hang"):
        time.sleep(1000)
    if solution_str.startswith("wait"):
        time.sleep(3)
    if solution_str.startswith("crash"):
        os._exit(3)
    if solution_str.startswith("late"):
        raise TimeoutError("too late")
    return 1.0


async def wait(data_source, solution_str, ground_truth, extra_info):
    if solution_str.startswith("hang"):
        await asyncio.sleep(1000)
    return 1.0
"""


def config(tmp_path, *, name="score", **source):
    path = tmp_path / "reward.py"
    path.write_text(FUNCTION)
    timeouts = {"total_s": 1.0}
    return {
        "sources": {"f": {"kind": "function", "function": f"{path}:{name}", "timeouts": timeouts, **source}},
        "judges": {"j": {"kind": "function"}},
        "engine": {"deadline_s": 60, "seed": 1},
    }


def samples(kind, bad, good):
    """The bad ones are the longest, so that they go first."""
    said = [f"{kind} " + "x" * 500] * bad + ["fine"] * good
    return [Sample([{"role": "user", "content": "?"}], response) for response in said]


def score(tree, batch):
    async def main():
        async with RewardEngine(tree) as engine:
            outcomes = await engine.score_all(batch)
            return outcomes, engine.statistics().sources["f"]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "reason", "options"),
    [
        ("hang", "hung", {"workers": 1}),
        ("crash", "crashed", {"workers": 1}),
        ("crash", "crashed", {"workers": 2}),
        ("late", "exhausted", {"workers": 1}),
        ("hang", "hung", {"name": "wait", "limits": {"concurrency": 1}}),
    ],
)
def test_samples_that_hang_or_crash_a_function_cost_only_themselves(tmp_path, kind, reason, options):
    outcomes, source = score(config(tmp_path, **options), samples(kind, 3, 60))
    assert all(isinstance(outcome, Scored) for outcome in outcomes[3:])
    assert [outcome.reason for outcome in outcomes[:3]] == [reason] * 3
    # One that raised a time-out before anybody was answered is not blamed for that yet. A call that hung for its whole
    # time limit is not tried again.
    attempts = {"late": {2, 3}, "hang": {1}, "crash": {2}}[kind]
    assert {outcome.attempts for outcome in outcomes[:3]} <= attempts
    assert source.state == "up"


BESIDE = """
import os

def score(solution_str, **_):
    import beside_the_reward
    return beside_the_reward.VALUE if solution_str == "fine" else os._exit(3)
"""


def test_a_chdir_changes_nothing_later(tmp_path, monkeypatch):
    """Workers start late, and are replaced. Both the file and what it imports are those of the constructor."""
    for folder, value, right in (("a", 0.25, "fine"), ("b", 9.0, "none")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(BESIDE.replace("fine", right))
        (tmp_path / folder / "beside_the_reward.py").write_text(f"VALUE = {value}\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path / "a")
    tree = config(tmp_path, workers=1)
    tree["sources"]["f"]["function"] = "reward.py:score"

    async def main():
        async with RewardEngine(tree) as engine:
            os.chdir(tmp_path / "b")
            given = [Sample([{"role": "user", "content": "?"}], response) for response in ("fine", "crash", "fine")]
            return [(await engine.score(sample)).reward for sample in given]

    assert asyncio.run(main()) == [0.25, None, 0.25]
