"""The bench of requests with several calls, with few samples."""

from __future__ import annotations

import json

import pytest


def test_all_policies_score_all_samples(bench, tmp_path, monkeypatch):
    import batching

    path = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["batching.py", "--samples", "200", "--json", str(path)])
    monkeypatch.setattr(batching, "SETTINGS", batching.SETTINGS[:2])
    batching.main()
    found = json.loads(path.read_text())
    assert [one["policy"] for one in found] == ["ours", "single", "timer"] * 2
    ours, single, timer = found[:3]
    assert ours["samples_per_s"] > 2 * single["samples_per_s"]
    assert ours["wait_p50_s"] < timer["wait_p50_s"]
    assert (ours["requests"], single["requests"]) == (4, 200)


def test_at_little_load_nothing_is_slower_than_one_by_one(bench):
    import batching

    from qreward_plugins.simulation import run

    setting = batching.Setting("little load", 0.02, 0.002, 1, over_s=10.0)
    ours, single = (run(batching.simulated(setting, policy, 100)) for policy in ("ours", "single"))
    assert ours[1] == pytest.approx(single[1])
