"""What of verl's configuration ends the run before training starts, because its first step would."""

from __future__ import annotations

import dataclasses

import pytest
from omegaconf import open_dict

from qreward_plugins import ConfigurationError, load_config
from qreward_plugins.testing import FakeVerlTrainer, JudgeServer
from qreward_plugins.testing.verl.trainer import compose_config
from verl_adapter.settings import with_reward_model
from verl_adapter.startup import _BEYOND_V1, _TREE_KEYS, refuse_impossible

from ..kit import each_of

OURS = "reward.reward_manager.name=qreward"
V1, LEGACY = "trainer.use_v1=True", "trainer.use_v1=False"
GDPO = "algorithm.adv_estimator=gdpo"


@pytest.fixture
def compose():
    """verl's configuration with these overrides."""
    return lambda *overrides: compose_config(overrides)


@each_of("name", _BEYOND_V1)
def test_an_estimator_that_v1_cannot_feed_is_refused_there(compose, name):
    config = compose(f"algorithm.adv_estimator={name}")
    with pytest.raises(ConfigurationError, match=rf"`{name}` needs .* V1 trainer .*trainer\.use_v1=False"):
        refuse_impossible(config, "v1")
    refuse_impossible(config, "legacy")


def fake(*overrides):
    return FakeVerlTrainer([OURS, "reward.num_workers=1", *overrides], reward=lambda **_: 1.0)


@each_of("trainer", [V1, LEGACY])
def test_gdpo_names_rewards_that_somebody_gives(trainer):
    with JudgeServer() as server:
        judge = [
            f"+qreward.sources.judge={{kind: openai, base_url: '{server.base_url}', model: judge}}",
            "+qreward.judges.quality={kind: llm, criteria: {style: 'is it well written?'}}",
        ]
        with pytest.raises(ConfigurationError) as caught:
            fake(GDPO, "+algorithm.gdpo_reward_keys=[a,b]", trainer, *judge)
        assert [str(mistake.path) for mistake in caught.value.mistakes] == ["algorithm.gdpo_reward_keys"] * 2
        fake(GDPO, "+algorithm.gdpo_reward_keys=[qreward/score/style]", trainer, *judge).close()


def test_the_key_that_verl_reads_no_more_ends_the_run():
    """verl would score with its own manager. Its program of fully_async still moves the value to the new key."""
    old = "reward_model.reward_manager=qreward"
    with pytest.raises(ConfigurationError, match=r"verl ignores this key.*reward\.reward_manager\.name=qreward"):
        FakeVerlTrainer([old], reward=lambda **_: 1.0)
    fake(old).close()
    FakeVerlTrainer(["reward_model.reward_manager=dapo"], reward=lambda **_: 1.0).close()


def test_all_mistakes_are_named_at_once(compose):
    overlong = "+reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 64}"
    config = compose("algorithm.adv_estimator=remax", "reward.reward_model.enable=True", overlong)
    with pytest.raises(ConfigurationError) as caught:
        refuse_impossible(config, "v1")
    assert [mistake.path for mistake in caught.value.mistakes] == [
        "reward.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_model.enable",
        "algorithm.adv_estimator",
    ]


def test_a_misspelt_tree_ends_the_run_instead_of_being_ignored(compose):
    config = compose("+qrewards.config=judges.yaml")
    with pytest.raises(ConfigurationError, match=r"qrewards: unknown key\. Did you mean `qreward`\?"):
        refuse_impossible(config, "v1")


@each_of(
    "place",
    [
        "reward.qreward.config",
        "reward.reward_manager.config",
        "reward.reward_kwargs.qreward_config",
        "trainer.qreward.config",
    ],
)
def test_a_tree_at_a_place_where_nobody_reads_it_ends_the_run(compose, place):
    """Without a message, verl's reward function would score in place of the judges."""
    config = compose("reward.reward_manager.name=qreward", f"+{place}=judges.yaml")
    with pytest.raises(ConfigurationError, match=r"\+qreward\.config=FILE") as caught:
        refuse_impossible(config, "v1")
    assert len(caught.value.mistakes) == 1
    assert place.startswith(caught.value.mistakes[0].path)


@each_of(
    "override",
    [
        "+reward.custom_reward_function.reward_kwargs.qreward={config: judges.yaml}",
        "+trainer.tags.qreward=true",
        "+data.by_number={0: {weight: 1}, 1: {weight: 2}}",
        "+data.nested.seed=${oc.env:NOBODY_SETS_IT}",
        "+reward.reward_manager.alpha=1",
        "+my_experiments.qreward.config=judges.yaml",
    ],
)
def test_names_that_only_look_like_the_trees_are_nobodys_mistake(compose, override):
    config = compose("reward.reward_manager.name=qreward", "+qreward.config=judges.yaml", override)
    refuse_impossible(config, "v1")


def test_a_tree_that_qreward_refers_to_is_not_misplaced(compose):
    config = compose("reward.reward_manager.name=qreward", "+reward.qreward.config=judges.yaml")
    with open_dict(config):
        config.qreward = "${reward.qreward}"
    refuse_impossible(config, "v1")


def test_the_reward_manager_of_verl_declares_no_key_of_a_tree():
    reward = pytest.importorskip("verl.workers.config.reward", reason="verl is not installed")
    assert not _TREE_KEYS & {one.name for one in dataclasses.fields(reward.RewardManagerConfig)}


def test_a_manager_of_ones_own_is_not_checked(compose):
    refuse_impossible(compose("+reward.reward_manager._target_=my.Config", "+reward.reward_manager.sources=2"), "v1")


def test_the_reward_model_that_verl_serves_is_found_by_its_name(tmp_path):
    tree = {"kind": "reward_model", "base_url": "framework://reward", "model": "rm"}
    settings = load_config({"sources": {"rm": tree}, "judges": {"rm": {"kind": "reward_model"}}})
    assert with_reward_model(settings, "10.0.0.1:8000").sources["rm"].urls == ("http://10.0.0.1:8000",)
    ours = [
        "+qreward.sources.rm.kind=reward_model",
        "+qreward.sources.rm.base_url=framework://reward",
        "+qreward.sources.rm.model=rm",
        "+qreward.judges.rm.kind=reward_model",
    ]
    with pytest.raises(ConfigurationError, match=r"this run of verl has no server 'reward'.*reward_model.enable=True"):
        fake(*ours)
    path = tmp_path / "any.py"
    path.write_text("def compute_score(**_):\n    return 0.0\n")
    served = [
        "+qreward.on_failure=raise",
        "reward.reward_model.enable=True",
        f"reward.custom_reward_function.path={path}",
    ]
    with fake(*ours, *served) as run:
        assert run  # the manager was made: it knows the address of verl's router
