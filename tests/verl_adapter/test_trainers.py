"""Which trainer a run has: by who starts verl's reward workers, and by its configuration where nobody says."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.config import Constant
from qreward_plugins.testing import FakeVerlTrainer
from verl_adapter import trainer_hooks as hooks
from verl_adapter.policy import failure_policy, takes_any_keys
from verl_adapter.settings import load_settings
from verl_adapter.trainers import Trainer, calling_trainer, trainer_of, with_trainer

FULLY_ASYNC = ("+async_training.staleness_threshold=0.1", "+rollout.nnodes=1")
ONE_STEP_OFF = ("+rollout.nnodes=1", "+rollout.n_gpus_per_node=1")
EXPERIMENTAL = {"fully_async": FULLY_ASYNC, "one_step_off": ONE_STEP_OFF}
OURS = "reward.reward_manager.name=qreward"


@pytest.fixture(scope="module")
def classes():
    """verl's trainer classes, by name; what Ray made actors of is taken out of them again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        legacy = importlib.import_module("verl.trainer.ppo.ray_trainer").RayPPOTrainer
        v1 = importlib.import_module("verl.trainer.ppo.v1").PPOTrainerSync
        one = importlib.import_module("verl.experimental.one_step_off_policy.ray_trainer").OneStepOffRayTrainer
        fully = importlib.import_module("verl.experimental.fully_async_policy.fully_async_rollouter")
        rollouter = fully.FullyAsyncRollouter.__ray_metadata__.modified_class
    return {"legacy": legacy, "v1": v1, "one_step_off": one, "fully_async": rollouter}


@pytest.mark.parametrize("name", ["legacy", "v1", "one_step_off", "fully_async"])
def test_a_trainer_is_told_by_the_class_that_starts_the_reward_workers(classes, name):
    assert calling_trainer() is None

    def starts(self):
        # The fully asynchronous one starts them in a thread, out of a lambda that knows it.
        told = []
        thread = threading.Thread(target=lambda: told.append((self, calling_trainer())))
        thread.start()
        thread.join()
        return told[0][1], calling_trainer()

    made = type("Derived", (classes[name],), {"starts": starts, "__init__": lambda self: None})()
    assert made.starts() == (name, name)


def test_without_that_the_configuration_says_it(compose):
    assert trainer_of(compose()) == Trainer("v1")
    assert trainer_of(compose("trainer.use_v1=False")) == Trainer("legacy")
    assert trainer_of(compose("actor_rollout_ref.hybrid_engine=False")) == Trainer("v1"), "V1 has such a mode"
    for name, overrides in EXPERIMENTAL.items():
        config = compose(*overrides)
        assert config.trainer.use_v1
        assert trainer_of(config) == Trainer(name)
        assert not takes_any_keys(config)
        told = with_trainer(config, Trainer("v1", marks_validation=True))
        assert trainer_of(told) == Trainer("v1", marks_validation=True)
        assert trainer_of(config) == Trainer(name), "the trainer's own configuration is left as it is"


@pytest.mark.parametrize("config_name", ["fully_async_ppo_trainer", "one_step_off_ppo_trainer"])
def test_the_configurations_that_verl_ships_for_them_are_known(config_name):
    from hydra import compose, initialize_config_dir

    package = f"verl.experimental.{config_name.removesuffix('_ppo_trainer')}_policy"
    home = Path(importlib.util.find_spec(package).submodule_search_locations[0]) / "config"
    # The searchpath of one of them is relative to verl's own repository.
    overrides = ["hydra.searchpath=[pkg://verl.trainer.config]", OURS, "actor_rollout_ref.hybrid_engine=False"]
    with initialize_config_dir(str(home), version_base=None):
        config = compose(config_name, overrides=overrides)
    assert config.trainer.use_v1
    assert trainer_of(config).name == config_name.removesuffix("_ppo_trainer")


@pytest.mark.parametrize("name", list(EXPERIMENTAL))
def test_the_experimental_trainers_cannot_leave_samples_out_and_nothing_is_to_end_them(compose, name):
    def policy(*overrides):
        config = compose(OURS, "actor_rollout_ref.rollout.n=4", *EXPERIMENTAL[name], *overrides)
        return failure_policy(load_settings(config), config)

    assert policy("algorithm.adv_estimator=grpo") == "neutral"
    with pytest.raises(ConfigurationError, match=rf"{name} trainer, .*main_ppo.*`gae`.*`{{constant: x}}`"):
        policy("algorithm.adv_estimator=gae")
    with pytest.raises(ConfigurationError, match="Or choose `neutral`"):
        policy("algorithm.adv_estimator=grpo", "+qreward.on_failure=exclude")
    constant = policy("algorithm.adv_estimator=gae", "+qreward.on_failure.constant=-1")
    assert constant == Constant(constant=-1)


@pytest.mark.parametrize("name", list(EXPERIMENTAL))
@pytest.mark.parametrize("info", [{}, {"qreward_validation": True}, {"split": "test"}])
def test_no_failed_sample_raises_in_them(compose, tokenizer, make_data, name, info):
    from verl.trainer.ppo.reward import load_reward_manager

    grpo = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "reward.num_workers=1")
    quick = ("+qreward.groups.wait_s=0.05", "+qreward.sources.compute_score.mode=thread")
    config = compose(OURS, *EXPERIMENTAL[name], *grpo, *quick)

    async def main():
        manager = load_reward_manager(config, tokenizer)
        try:
            data = make_data(["so it is"], data_source="nobody/knows", columns={"extra_info": [info]})
            return await manager.run_single(data)
        finally:
            await manager.aclose()

    result = asyncio.run(main())
    assert result["reward_extra_info"]["qreward/missing"] == 1.0
    assert math.isnan(result["reward_extra_info"]["acc"])


def play(*overrides, **named):
    return FakeVerlTrainer(["algorithm.adv_estimator=grpo", "reward.num_workers=2", *overrides], **named)


@pytest.mark.parametrize(
    ("name", "overrides"), [("v1", ()), ("legacy", ("trainer.use_v1=False",)), ("one_step_off", ())]
)
def test_reward_workers_are_told_which_trainer_they_work_for(name, overrides):
    experimental = name if name in EXPERIMENTAL else None
    with play(OURS, *overrides, experimental=experimental, reward=lambda **_: 1.0) as fake:
        told = [manager.config.qreward_trainer for manager in fake.reward_managers]
        assert told == [{"name": name, "marks_validation": True}] * 2
        assert "qreward_trainer" not in fake.config


def test_another_reward_manager_is_left_alone():
    with play(reward=lambda **_: 1.0) as fake:
        assert all("qreward_trainer" not in manager.config for manager in fake.reward_managers)


def test_a_reward_model_that_bypasses_every_manager_ends_the_run_before_a_worker_is_started():
    with pytest.raises(ConfigurationError, match=r"custom_reward_function\.path.*reward_model\.enable=False"):
        play(OURS, "reward.reward_model.enable=True")


def test_a_penalty_of_another_manager_is_warned_of(caplog):
    play(OURS, "+reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 16, penalty_factor: 1.0}").close()
    assert "overlong_buffer_cfg" in caplog.text


def test_the_module_of_the_separated_trainers_is_wrapped_too(monkeypatch):
    def compute_advantage(data):
        return data

    separated = SimpleNamespace(compute_advantage=compute_advantage)
    monkeypatch.setitem(sys.modules, hooks._SEPARATED, separated)
    monkeypatch.setitem(sys.modules, hooks.LEGACY_MODULE, None)
    monkeypatch.setitem(sys.modules, hooks.V1_MODULE, None)
    hooks._wrap_trainers(SimpleNamespace())
    assert separated.compute_advantage.__wrapped__ is compute_advantage
