"""The benches of requests with several calls and of ways to judge, with few samples."""

from __future__ import annotations

import json

import batching
import judging
import pytest

from qreward_plugins.simulation import run


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
