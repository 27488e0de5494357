"""The bench of the keeper, with few workers and one minute."""

from __future__ import annotations

import json

import keeper
import pytest


@pytest.mark.parametrize("demand", keeper.DEMANDS)
def test_plans_have_more_work_than_the_limits_let_through(demand):
    plan = keeper.plan(demand, 32, [600.0, 60.0], 4)
    for source, limit in zip(plan.sources, (600.0, 60.0), strict=True):
        work = [one for one in plan.work if one.source == source.key]
        assert sum(one.count for one in work) >= 4 * limit
        assert len({one.worker for one in work}) == (2 if demand == "skewed" else 32)


def test_it_measures_and_writes_what_it_shows(tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["--workers", "4", "--minutes", "1", "--per-minute", "600", "--demand", "equal", "--json", str(path)]
    assert keeper.main(arguments) == 0
    (found,) = json.loads(path.read_text())
    assert found["used"] == [[1.0]]
    assert found["violations"] == 0
    assert found["requests_per_call"] == pytest.approx(600 / found["calls"])
    assert found["cpu_ms_per_call"] > 0
    assert "equal" in capsys.readouterr().out
