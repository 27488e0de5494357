"""The bench of ways to judge, with few samples."""

from __future__ import annotations

import json

import pytest


def test_every_policy_scores_all_samples_and_decided_groups_cost_nothing(bench, tmp_path, monkeypatch, capsys):
    import judging

    path = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["judging.py", "--prompts", "32", "--json", str(path)])
    judging.main()
    assert "gate, rank" in capsys.readouterr().out
    found = {one["policy"]: one for one in json.loads(path.read_text())}
    assert set(found) == set(judging.POLICIES)
    assert {one["scored"] for one in found.values()} == {256}
    assert (found["judge"]["calls"]["large"], found["rank"]["calls"]["large"]) == (256, 32)
    # Groups that are all wrong are not asked about; those with one right answer are, about that.
    assert found["gate, rank"]["calls"]["large"] == pytest.approx(32 * (1 - found["gate, rank"]["flat"]), abs=2)
    assert found["gate, rank"]["usd"] < 0.4 * found["judge"]["usd"]


def test_advantages_of_decided_groups_are_zero_whether_they_are_asked_or_not(bench):
    import judging

    samples = judging.draw(16, 8, seed=3)
    _, gated = judging.judged("gate, rank", samples)
    for place in range(0, len(samples), 8):
        if not any(judging._is_right(sample.response) for sample in samples[place : place + 8]):
            assert set(gated[place : place + 8]) == {0.0}
