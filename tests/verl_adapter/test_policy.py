"""What `on_failure` comes to in a verl run, and what verl's estimators make of an imputed sample."""

from __future__ import annotations

import asyncio
import math

import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.config import Constant
from verl_adapter.policy import MEAN_BASED, failure_policy, warn_of_short_waiting
from verl_adapter.settings import load_settings

OTHER_BASELINES = {"opo", "optimal_token_baseline", "tir_optimal_token_baseline"}
NOT_GROUPED = {"gae", "reinforce_plus_plus", "remax"}

LEGACY = "trainer.use_v1=False"
COLOCATED = ("reward.reward_model.enable=True", "reward.custom_reward_function.path=rewards.py")


@pytest.fixture(scope="module")
def trainer_of():
    """verl's own configuration with these changes; composing it anew for each takes longer than all else here."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        defaults = compose("ppo_trainer", overrides=["reward.reward_manager.name=qreward"])
    OmegaConf.set_struct(defaults, False)

    def trainer_of(*changes):
        return OmegaConf.merge(defaults, OmegaConf.from_dotlist(list(changes)))

    return trainer_of


@pytest.fixture
def policy(trainer_of):
    def policy(estimator, *changes, n=4):
        trainer = trainer_of(f"algorithm.adv_estimator={estimator}", f"actor_rollout_ref.rollout.n={n}", *changes)
        return failure_policy(load_settings(trainer), trainer)

    return policy


@pytest.mark.parametrize("estimator", sorted(MEAN_BASED))
@pytest.mark.parametrize("trainer", ["trainer.use_v1=True", LEGACY])
def test_failed_samples_are_neutral_where_the_baseline_is_the_mean_of_a_group(policy, estimator, trainer):
    assert policy(estimator, trainer) == "neutral"


@pytest.mark.parametrize("estimator", ["gae", "opo", "reinforce_plus_plus", "one_of_my_own"])
def test_elsewhere_the_v1_trainer_leaves_them_out(policy, estimator):
    assert policy(estimator) == "exclude"


@pytest.mark.parametrize("estimator", sorted(OTHER_BASELINES | {"one_of_my_own"}))
def test_the_legacy_trainer_cannot_so_a_group_of_another_baseline_gets_its_mean_too(policy, estimator):
    assert policy(estimator, LEGACY) == "neutral"


@pytest.mark.parametrize("estimator", sorted(NOT_GROUPED | {"gdpo"}))
def test_the_legacy_trainer_without_groups_wants_a_choice(policy, estimator):
    with pytest.raises(ConfigurationError, match=rf"trainer\.use_v1=True.*`{estimator}`.*`{{constant: x}}`.*`raise`"):
        policy(estimator, LEGACY)
    assert policy(estimator, LEGACY, "qreward.on_failure=raise") == "raise"
    assert policy(estimator, LEGACY, "qreward.on_failure.constant=-1") == Constant(constant=-1)


def test_a_group_of_one_has_no_siblings(policy):
    assert policy("grpo", n=1) == "exclude"
    with pytest.raises(ConfigurationError, match="one sample"):
        policy("grpo", LEGACY, n=1)
    with pytest.raises(ConfigurationError, match=r"one sample .*Or choose `exclude`"):
        policy("grpo", "qreward.on_failure=neutral", n=1)


def test_what_is_asked_for_is_done_or_refused(policy):
    assert policy("grpo", "qreward.on_failure=exclude") == "exclude"
    assert policy("opo", "qreward.on_failure=neutral") == "neutral"
    with pytest.raises(ConfigurationError, match="`gae` does not compare"):
        policy("gae", "qreward.on_failure=neutral")
    with pytest.raises(ConfigurationError, match=r"needs trainer\.use_v1=True\. Or choose `neutral`"):
        policy("grpo", LEGACY, "qreward.on_failure=exclude")


def test_passk_ends_the_run_at_a_group_of_one_so_nothing_is_left_out(policy):
    assert policy("grpo_passk") == "neutral"
    with pytest.raises(ConfigurationError, match=r"`grpo_passk` ends the run at a group of one .*Or choose `neutral`"):
        policy("grpo_passk", "qreward.on_failure=exclude")
    replaced = "trainer.v1.trainer_mode=separate_async"
    assert policy("grpo_passk", "qreward.on_failure=exclude", replaced) == "exclude", "the group is replaced there"


def test_a_reward_model_that_takes_turns_scores_batches_in_which_nothing_can_be_left_out(policy):
    with pytest.raises(ConfigurationError, match="enable_resource_pool=True"):
        policy("grpo", *COLOCATED)
    assert policy("grpo", *COLOCATED, LEGACY) == "neutral"
    assert policy("grpo", *COLOCATED, "reward.reward_model.enable_resource_pool=True") == "neutral"


def test_every_estimator_of_this_verl_is_known_here():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    names = {str(getattr(name, "value", name)) for name in ADV_ESTIMATOR_REGISTRY}
    assert names == MEAN_BASED | OTHER_BASELINES | NOT_GROUPED | {"gdpo"}


def test_more_samples_than_may_wait_are_warned_of(trainer_of, caplog):
    def said(*overrides):
        caplog.clear()
        trainer = trainer_of("data.train_batch_size=512", "actor_rollout_ref.rollout.n=8", *overrides)
        warn_of_short_waiting(trainer, int(trainer.reward.num_workers))
        return caplog.text

    assert "At most 500 failed samples" in said("reward.num_workers=8")
    assert "Set reward.num_workers=9" in said("reward.num_workers=8")
    assert said("reward.num_workers=9") == ""


def test_the_fully_asynchronous_trainer_scores_as_many_at_once_as_it_may_begin(trainer_of, caplog):
    """Its batch size is 0, and its engines or its staleness set the limit."""

    def said(*overrides):
        caplog.clear()
        tree = ["data.train_batch_size=0", "actor_rollout_ref.rollout.n=8", "rollout.n_gpus_per_node=8"]
        tree += ["async_training.staleness_threshold=0.5", "async_training.trigger_parameter_sync_step=4"]
        trainer = trainer_of(*tree, "actor_rollout_ref.actor.ppo_mini_batch_size=256", *overrides)
        warn_of_short_waiting(trainer, int(trainer.reward.num_workers))
        return caplog.text

    assert "the 5120 samples" in said("rollout.nnodes=10"), "40 engines of two devices, 16 prompts each"
    assert "Set reward.num_workers=11 to" in said("rollout.nnodes=10")
    assert "the 12288 samples" in said("rollout.nnodes=100"), "256 prompts, half as many more, four times"
    assert said("rollout.nnodes=7") == ""


def advantages(estimator, scores, groups, config=None):
    """What verl makes of the scores of responses of three tokens each."""
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    rewards = torch.zeros(len(scores), 3)
    rewards[:, -1] = torch.tensor(scores)
    settings = {"norm_adv_by_std_in_grpo": True, **(config or {})}
    values, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=rewards,
        response_mask=torch.ones(len(scores), 3),
        index=np.array(groups, dtype=object),
        config=settings,
    )
    assert torch.isfinite(values).all()
    return values[:, 0].tolist()


SCORED = [0.1, 0.9, 0.4, 0.4, 0.7]
MEAN = math.fsum(SCORED) / len(SCORED)


@pytest.mark.parametrize("estimator", sorted(MEAN_BASED - {"reinforce_plus_plus_baseline"}))
def test_the_mean_of_the_scored_has_no_advantage(estimator):
    imputed = advantages(estimator, [*SCORED, MEAN, MEAN, MEAN], ["g"] * 8)[5:]
    assert imputed == pytest.approx([0, 0, 0], abs=1e-5)


@pytest.mark.parametrize("estimator", ["rloo", "rloo_vectorized", "gpg"])
def test_siblings_keep_their_order_and_the_mean_its_place(estimator):
    values = advantages(estimator, [*SCORED, MEAN, MEAN, MEAN], ["g"] * 8)
    factor = values[1] / (SCORED[1] - MEAN)
    assert values[:5] == pytest.approx([factor * (score - MEAN) for score in SCORED], abs=1e-5)


def test_whitening_gives_an_imputed_sample_what_an_average_one_gets():
    imputed = advantages("reinforce_plus_plus_baseline", [*SCORED, MEAN, 0.0, 1.0, 0.5], ["g"] * 6 + ["h"] * 3)
    assert imputed[5] == pytest.approx(imputed[8], abs=1e-5), "0.5 is the mean of the group h"


@pytest.mark.parametrize("failed", [1, 3, 11])
@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized"])
def test_with_std_the_siblings_advantages_grow_by_the_root_of_what_was_imputed(estimator, failed):
    alone = advantages(estimator, SCORED, ["g"] * 5)
    size = len(SCORED) + failed
    together = advantages(estimator, [*SCORED, *[MEAN] * failed], ["g"] * size)
    factor = math.sqrt((size - 1) / (len(SCORED) - 1))
    assert together[:5] == pytest.approx([value * factor for value in alone], rel=1e-4, abs=1e-5)


def test_of_a_group_that_failed_whole_nothing_is_learned():
    for estimator in MEAN_BASED - {"reinforce_plus_plus_baseline"}:
        assert advantages(estimator, [0.0] * 4, ["g"] * 4) == [0.0] * 4


def test_the_barrier_of_a_manager_is_closed_with_it(compose, tokenizer):
    from verl.trainer.ppo.reward import load_reward_manager

    manager = load_reward_manager(compose("reward.reward_manager.name=qreward"), tokenizer)
    asyncio.run(manager.aclose())
    assert manager._barrier._closed
