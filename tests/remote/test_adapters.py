"""verl, slime, ROLL and `qreward score` with a reward server as their engine: no other setting changes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from qreward_plugins.cli.app import app


class Rollout(SimpleNamespace):
    """slime's sample; the adapter keeps weak references to it."""


WORDS = ["so: 0.25", "so: 0.5", "so: break", "so: 0.75"]


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_verl(serving, remote):
    from qreward_plugins.testing import FakeVerlTrainer

    with serving(judge={"correct_at": 0.5}) as there:
        overrides = [
            "reward.reward_manager.name=qreward",
            f"+qreward.engine.server={there.url}",
            "+qreward.groups.wait_s=10",
            "trainer.use_v1=False",
            "data.train_batch_size=1",
            "actor_rollout_ref.rollout.n=4",
            "algorithm.adv_estimator=grpo",
            "reward.num_workers=1",
            "actor_rollout_ref.rollout.agent.num_workers=1",
        ]
        with FakeVerlTrainer(overrides, respond=lambda draft, rng: WORDS[draft.number % 4]) as fake:
            step = fake.step()
    missing = [info["qreward/missing"] for info in step.extra_info]
    assert missing.count(1.0) == 1
    assert sorted(info["qreward/score/clarity"] for info in step.extra_info if not info["qreward/missing"]) == [
        0.125,
        0.25,
        0.375,
    ]
    assert sorted(info["acc"] for info in step.extra_info if not info["qreward/missing"]) == [0.0, 1.0, 1.0]


def test_slime(serving, remote):
    import slime_adapter

    samples = [
        Rollout(
            response=word,
            label="1",
            prompt="How much?",
            group_index=0,
            index=number,
            reward=None,
            metadata={},
            remove_sample=False,
            status=SimpleNamespace(value="completed"),
            non_generation_time=0.0,
        )
        for number, word in enumerate(WORDS)
    ]
    with serving() as there:
        args = SimpleNamespace(qreward=remote(there), custom_reward_post_process_path="x", n_samples_per_prompt=4)
        try:
            rewards = asyncio.run(slime_adapter.reward_group(args, samples))
        finally:
            slime_adapter.close()
    assert rewards == [0.25, 0.5, 0.5, 0.75]
    assert [sample.remove_sample for sample in samples] == [False, False, True, False]
    assert samples[2].metadata["qreward"]["cause"] == "infra/exhausted"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_roll(serving, remote):
    from qreward_plugins.testing import roll_stand_in

    with serving() as there, roll_stand_in(over_installed=True):
        from qreward_plugins.testing import FakeRollTrainer

        worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [remote(there)]}
        trainer = FakeRollTrainer(
            {"judged": worker},
            respond=lambda draft, rng: WORDS[draft.number % 4],
            adv_estimator="grpo",
            rollout_batch_size=1,
            user_defined_rollout_loop_cls="roll_adapter.QRewardRolloutLoop",
            timeout_s=30.0,
        )
        try:
            step = trainer.step()
        finally:
            trainer.close()
    assert sorted(step.raw_rewards) == [0.25, 0.5, 0.5, 0.75]
    assert sorted(step.trained_tokens)[0] == 0


def test_a_file_of_rollouts(serving, remote, tmp_path):
    rollouts, config, out = tmp_path / "rollouts.jsonl", tmp_path / "judges.yaml", tmp_path / "scored.jsonl"
    rollouts.write_text("\n".join(json.dumps({"prompt": "?", "response": word}) for word in WORDS))
    with serving() as there:
        config.write_text(yaml.safe_dump(remote(there)))
        result = CliRunner().invoke(app, ["score", str(config), str(rollouts), "--out", str(out)])
        assert result.exit_code == 3, result.output
        checked = CliRunner().invoke(app, ["check", str(config)])
        assert (checked.exit_code, "components: clarity" in checked.output) == (0, True), checked.output
    rows = [json.loads(line)["qreward"] for line in out.read_text().splitlines()]
    assert [row["reward"] for row in rows] == [0.25, 0.5, None, 0.75]
    assert list(tmp_path.glob("*.journal")) == []
