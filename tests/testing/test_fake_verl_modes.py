"""Modes of verl's trainers on the stand-in: separate from the rollout, and corrected for another policy."""

from __future__ import annotations

import numpy as np
import pytest

from qreward_plugins.testing import FakeVerlTrainer

GRPO = "algorithm.adv_estimator=grpo"
BOTH = pytest.mark.parametrize("trainer", [(), ("trainer.use_v1=False",)], ids=["v1", "legacy"])
SEPARATE = [
    GRPO,
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]


def right(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in solution_str)


def in_turns(draft, rng):
    return f"It is {draft.ground_truth if draft.number % 2 else 'nothing'}"


def test_a_step_of_separate_async_is_of_several_mini_batches():
    with FakeVerlTrainer(SEPARATE, reward=right, respond=in_turns) as fake:
        steps = [fake.step() for _ in range(3)]
    for step in steps:
        assert step.scores == [0.0, 1.0] * 8
        assert len(set(step.uids)) == 4
        assert step.metrics["critic/score/mean"] == 0.5
        assert not any(step.padding)
    assert len({uid for step in steps for uid in step.uids}) == 12


def test_separate_async_replaces_groups_that_fail_and_adds_up_how_many():
    failing = []

    def reward(data_source, solution_str, ground_truth, extra_info):
        failing.append(1)
        if len(failing) <= 2:
            raise ValueError("no such answer")
        return right(data_source, solution_str, ground_truth, extra_info)

    with FakeVerlTrainer(SEPARATE, reward=reward, respond=in_turns) as fake:
        steps = [fake.step() for _ in range(2)]
    evicted = sum(len(step.evicted) for step in steps)
    assert evicted >= 1
    assert sum(step.metrics.get("training/rollout_failure/evicted_samples", 0) for step in steps) == evicted
    assert all(len(step.scores) == 16 for step in steps)


def test_a_group_that_comes_too_late_is_replaced():
    """One that was handed out for the first step and comes in the third is older than allowed."""
    first_group: list[str] = []

    def hold(draft):
        first_group.append(draft.uid)
        return draft.uid == first_group[0]

    overrides = [*SEPARATE, "trainer.v1.sampler.max_off_policy_threshold=2"]
    with FakeVerlTrainer(overrides, reward=right, respond=in_turns, hold=hold) as fake:
        steps = [fake.step(), fake.step()]
        assert fake.release() == 4
        steps.append(fake.step())
    evicted = [step.metrics.get("training/off_policy/evicted_samples", 0) for step in steps]
    assert sum(evicted) >= 1
    assert first_group[0] in [uid for step in steps for uid in step.evicted]
    assert max(step.metrics.get("training/off_policy/evicted_samples_staleness/max", 0) for step in steps) == 3


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size=4", r"parameter_sync_step \* ppo_mini_batch_size"),
        ("actor_rollout_ref.rollout.nnodes=0", "nnodes must be > 0"),
        ("actor_rollout_ref.rollout.n_gpus_per_node=0", "n_gpus_per_node must be > 0"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=naive", "please use nccl/nixl/mooncake"),
        ("reward.reward_model.enable=True", "Colocate reward model"),
        ("trainer.v1.sampler.max_off_policy_threshold=0", "Invalid max off policy threshold"),
        ("trainer.v1.sampler.max_off_policy_strategy=hope", "Invalid max off policy strategy"),
    ],
)
def test_what_verl_asserts_of_it_ends_it_here(changed, match):
    with pytest.raises(AssertionError, match=match):
        FakeVerlTrainer([*SEPARATE, changed], reward=right)


def sampled_elsewhere(name, batch):
    """The engine was surer of the first token than the actor is."""
    mask = np.asarray(batch.batch["response_mask"], dtype=np.float32)
    probabilities = np.full(mask.shape, -1.0, dtype=np.float32)
    if name == "rollout_log_probs":
        probabilities[:, 0] = -0.2
    return probabilities


@BOTH
def test_rejected_tokens_do_not_train(trainer):
    overrides = [
        *(GRPO, *trainer, "algorithm.rollout_correction.rollout_rs=token_k1"),
        "algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0'",
    ]
    with FakeVerlTrainer(overrides, reward=right, respond=in_turns, log_probs=sampled_elsewhere) as fake:
        step = fake.step()
    mask = np.asarray(step.batch.batch["response_mask"])
    assert (mask[:, 0] == 0).all()
    assert (mask[:, 1] == 1).all()
    assert (np.asarray(step.batch.batch["advantages"])[:, 0] == 0).all()
    assert step.scores == [0.0, 1.0] * 8, "no reward is changed"
    assert step.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 4)
    assert step.metrics["rollout_corr/kl"] == pytest.approx(0.2)


@BOTH
def test_weights_of_tokens_stand_in_the_batch(trainer):
    overrides = [GRPO, *trainer, "algorithm.rollout_correction.rollout_is=token"]
    with FakeVerlTrainer(overrides, reward=right, respond=in_turns, log_probs=sampled_elsewhere) as fake:
        step = fake.step()
    weights = np.asarray(step.batch.batch["rollout_is_weights"])
    assert weights[:, 0] == pytest.approx(np.exp(-0.8))
    assert weights[:, 1] == pytest.approx(1.0)
    assert step.metrics["rollout_corr/rollout_is_min"] == pytest.approx(np.exp(-0.8))


def test_without_probabilities_nothing_is_said_of_them_and_bypassing_corrects_nothing():
    with FakeVerlTrainer([GRPO], reward=right) as fake:
        assert not any(name.startswith("rollout_corr") for name in fake.step().metrics)
    bypass = ["algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.rollout_is=token"]
    with FakeVerlTrainer([GRPO, *bypass], reward=right, log_probs=sampled_elsewhere) as fake:
        step = fake.step()
    assert "rollout_is_weights" not in step.batch.batch
    assert not any(name.startswith("rollout_corr") for name in step.metrics)
