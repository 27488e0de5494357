"""The real trainer for two steps, rewarded through qreward in two reward workers, by judges that fail now and then."""

from __future__ import annotations

import json
import sqlite3

import pytest

from qreward_plugins.testing import Faults, JudgeServer, ServerLimits

pytestmark = pytest.mark.trainer

LIMITS = ServerLimits(requests_per_minute=6000, window_s=10, concurrency=16)


def test_grpo_trains_while_one_judge_is_flaky_and_some_samples_are_lost(cpu_recipe, tmp_path):
    tasks = cpu_recipe.tasks
    assets = tasks.prepare(tmp_path / "assets", tasks.Sizes(learning_steps=20, habit_steps=5))
    # A request that both judges refuse for good loses its sample; the rest of the faults are mended by another try.
    faults = {"fast": {"error_422": 0.25}, "slow": {"error_422": 0.25, "error_500": 0.2, "wrong_nonce": 0.1}}
    servers = {
        name: JudgeServer(cpu_recipe.scorer.score, limits=LIMITS, faults=Faults(rates=rates), seed=3)
        for name, rates in faults.items()
    }
    journal = tmp_path / "journal"
    with servers["fast"] as fast, servers["slow"] as slow:
        training = cpu_recipe.training.train(
            assets,
            tmp_path / "out",
            algorithm="grpo",
            steps=2,
            environment={
                "QREWARD_CONFIG": str(cpu_recipe.folder / "judges.yaml"),
                "QREWARD_JOURNAL": str(journal),
                "FAST_JUDGE_URL": fast.base_url,
                "SLOW_JUDGE_URL": slow.base_url,
            },
            on_step=lambda step: None,
        )
        reports = [server.report() for server in servers.values()]
    assert [step.number for step in training.steps] == [1, 2]
    assert all(0 < step.reward < 1 for step in training.steps)
    assert [report.violations_total for report in reports] == [0, 0]
    connection = sqlite3.connect(journal)
    outcomes = dict(connection.execute("SELECT outcome, count(*) FROM outcomes GROUP BY outcome").fetchall())
    floors = connection.execute("SELECT count(*) FROM outcomes WHERE floor IS NOT NULL").fetchone()[0]
    processes = connection.execute("SELECT count(DISTINCT process_id) FROM outcomes").fetchone()[0]
    connection.close()
    assert sum(outcomes.values()) == 2 * 32 + 2 * 32  # two steps of 8 prompts x 4, and two validations
    assert outcomes["failed"] > 0  # they were neutral to their groups, and the training went on
    assert processes == 2
    metrics = [json.loads(line)["data"] for line in (tmp_path / "out" / "grpo.jsonl").read_text().splitlines()]
    rates = {"qreward/": "qreward/samples", "qreward/val/": "qreward/val/samples"}
    told = [
        (step[f"{of}failed_rate"], step[samples])
        for step in metrics
        for of, samples in rates.items()
        if samples in step
    ]
    assert len(told) == 4
    # An empty response is the policy's own failure, and has a score.
    assert sum(rate * samples for rate, samples in told) == pytest.approx(outcomes["failed"] - floors)
