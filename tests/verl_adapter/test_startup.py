"""What of verl's configuration ends the run before training starts, because its first step would; how the manager is
selected, and what is done in the trainer's process.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import threading
import warnings
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import verl_adapter
from qreward_plugins import ConfigurationError, load_config
from qreward_plugins.testing import FakeVerlTrainer
from qreward_plugins.testing.verl.trainer import compose_config
from verl_adapter import trainer_hooks
from verl_adapter.settings import load_settings, with_reward_model
from verl_adapter.startup import _BEYOND_V1, _TREE_KEYS, refuse_impossible
from verl_adapter.trainers import LEGACY_MODULE, V1_MODULE, calling_trainer, is_wrapped

from ..kit import each_of, imported, mistakes_of

OURS = "reward.reward_manager.name=qreward"


def composed(*overrides):
    """verl's configuration with these overrides, as its stand-in composes it."""
    return compose_config(overrides)


@each_of("name", _BEYOND_V1)
def test_an_estimator_that_v1_cannot_feed_is_refused_there(name):
    config = composed(f"algorithm.adv_estimator={name}")
    with pytest.raises(ConfigurationError, match=rf"`{name}` needs .* V1 trainer .*trainer\.use_v1=False"):
        refuse_impossible(config, "v1")
    refuse_impossible(config, "legacy")


def fake(*overrides):
    return FakeVerlTrainer([OURS, "reward.num_workers=1", *overrides], reward=lambda **_: 1.0)


def test_the_key_that_verl_reads_no_more_ends_the_run():
    """verl would score with its own manager. Its program of fully_async still moves the value to the new key."""
    old = "reward_model.reward_manager=qreward"
    with pytest.raises(ConfigurationError, match=r"verl ignores this key.*reward\.reward_manager\.name=qreward"):
        FakeVerlTrainer([old], reward=lambda **_: 1.0)
    fake(old).close()
    FakeVerlTrainer(["reward_model.reward_manager=dapo"], reward=lambda **_: 1.0).close()


def test_all_mistakes_are_named_at_once():
    overlong = "+reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 64}"
    config = composed("algorithm.adv_estimator=remax", "reward.reward_model.enable=True", overlong)
    assert list(mistakes_of(refuse_impossible, config, "v1")) == [
        "reward.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_model.enable",
        "algorithm.adv_estimator",
    ]


@each_of(
    ("place", "remedy"),
    [
        ("qrewards.config", "Did you mean `qreward`?"),
        ("reward.qreward.config", "+qreward.config=FILE"),
        ("reward.reward_manager.config", "+qreward.config=FILE"),
        ("reward.reward_kwargs.qreward_config", "+qreward.config=FILE"),
        ("reward.reward_model.qreward.config", "+qreward.config=FILE"),
        ("reward.custom_reward_function.qreward.config", "+qreward.config=FILE"),
        ("trainer.qreward.config", "+qreward.config=FILE"),
    ],
)
def test_a_tree_at_a_place_where_nobody_reads_it_ends_the_run(place, remedy):
    """Without a message, verl's reward function would score in place of the judges."""
    for at_the_top in ([], ["+qreward.config=judges.yaml"], ["+qreward.config=others.yaml"]):
        config = composed(OURS, f"+{place}=judges.yaml", *at_the_top)
        ((path, said),) = mistakes_of(refuse_impossible, config, "v1").items()
        assert (place.startswith(path), remedy in said) == (True, True)


@each_of(
    "override",
    [
        "+reward.custom_reward_function.reward_kwargs.qreward={config: judges.yaml}",
        "+trainer.tags.qreward=true",
        "+data.by_number={0: {weight: 1}, 1: {weight: 2}}",
        "+data.nested.seed=${oc.env:NOBODY_SETS_IT}",
        "+reward.reward_manager.alpha=1",
        "+my_experiments.qreward.config=judges.yaml",
        "+reward.reward_manager={_target_: my.Config, sources: 2}",
    ],
)
def test_names_that_only_look_like_the_trees_are_nobodys_mistake(override):
    refuse_impossible(composed(OURS, "+qreward.config=judges.yaml", override), "v1")


def test_the_reward_manager_of_verl_declares_no_key_of_a_tree():
    reward = pytest.importorskip("verl.workers.config.reward", reason="verl is not installed")
    assert not _TREE_KEYS & {one.name for one in dataclasses.fields(reward.RewardManagerConfig)}


def test_the_reward_model_that_verl_serves_is_found_by_its_name(any_function):
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
    with fake(*ours, any_function, "+qreward.on_failure=raise", "reward.reward_model.enable=True") as run:
        assert run  # the manager was made: it knows the address of verl's router


# Selecting the manager: verl's registries, its entry points, and the ways in which it says nothing


@pytest.fixture(scope="module")
def plugin():
    pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
    return imported("verl_adapter.plugin")


def test_every_registry_of_this_verl_has_it(plugin):
    """That importing verl registers it, a training shows (tests/recipes/test_verl_recipes.py)."""
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
    from verl.workers.reward_manager import get_reward_manager_cls as get_batch_cls

    assert plugin.register() == ["verl.experimental.reward_loop.reward_manager", "verl.workers.reward_manager"]
    assert get_reward_manager_cls("qreward") is verl_adapter.QRewardManager
    assert get_batch_cls("qreward") is verl_adapter.QRewardBatchManager


IMPORTED = [
    "reward.reward_manager.source=importlib",
    "reward.reward_manager.name=QRewardManager",
    "reward.reward_manager.module.path=pkg://verl_adapter",
]


@each_of("selection", [["reward.reward_manager.name=qreward"], ["+reward_manager=qreward"], IMPORTED])
def test_every_way_to_select_it_resolves_to_the_class(compose, selection):
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    assert resolve_reward_manager_cls(compose(*selection)) is verl_adapter.QRewardManager


def test_what_goes_wrong_while_registering_is_said_aloud(plugin, monkeypatch, caplog):
    def broken():
        raise ImportError("no torch")

    monkeypatch.setattr(plugin, "register", broken)
    with pytest.raises(ImportError):
        plugin._load()
    assert "could not register" in caplog.text


def test_the_search_path_plugin_needs_no_searchpath(compose, monkeypatch):
    for name, value in {"BASE_URL": "http://judge/v1", "MODEL": "m", "API_KEY": "k"}.items():
        monkeypatch.setenv(f"QREWARD_{name}", value)
    config = compose("+reward_manager=qreward", "+qreward=openai")
    assert config.reward.reward_manager.name == "qreward"
    assert config.qreward.sources.judge.base_url == "http://judge/v1"
    assert "QREWARD_API_KEY" in str(config.qreward)


def test_the_ready_made_tree_says_which_variables_it_needs(monkeypatch):
    for name in ("QREWARD_BASE_URL", "QREWARD_MODEL", "QREWARD_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    tree = OmegaConf.load(Path(verl_adapter.__file__).parent / "conf" / "qreward" / "openai.yaml")
    with pytest.raises(ConfigurationError, match="QREWARD_BASE_URL"):
        load_settings(None, tree)


# What is done in the trainer's process: with verl's own classes, but for the trainer around them


@pytest.fixture(scope="module")
def classes():
    """verl's trainer classes, by name; what Ray made actors of is taken out of them again."""
    pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl tells of every engine that is not installed
        legacy = importlib.import_module(LEGACY_MODULE).RayPPOTrainer
        v1 = importlib.import_module("verl.trainer.ppo.v1").PPOTrainerSync
        one = importlib.import_module("verl.experimental.one_step_off_policy.ray_trainer").OneStepOffRayTrainer
        fully = importlib.import_module("verl.experimental.fully_async_policy.fully_async_rollouter")
        rollouter = fully.FullyAsyncRollouter.__ray_metadata__.modified_class
    return {"legacy": legacy, "v1": v1, "one_step_off": one, "fully_async": rollouter}


@pytest.mark.parametrize("name", ["legacy", "v1", "one_step_off", "fully_async"])
def test_a_trainer_is_told_by_the_class_that_starts_the_reward_workers(classes, name):
    """Its configuration does not tell it: the experimental trainers inherit `trainer.use_v1: true`."""
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


def test_all_that_is_wrapped_is_in_the_installed_verl(classes, monkeypatch):
    """Else `on_failure: auto` is refused, or failed samples are in the means of validations."""
    modules, hooks = sys.modules, trainer_hooks
    wrapped = [(modules[module], name) for module, name in hooks._COMPUTES.values()]
    wrapped += [(modules[module], "process_validation_metrics") for module in (V1_MODULE, LEGACY_MODULE)]
    wrapped += [
        (modules[V1_MODULE].PPOTrainer, "_compute_reward_colocate"),
        (modules[LEGACY_MODULE].RayPPOTrainer, "_validate"),
        (modules[hooks._REPLAY_BUFFER].ReplayBuffer, "_dapo_filtered_keys"),
        (modules[hooks._REWARD_LOOP].RewardLoopManager, "compute_rm_score"),
        (loops := modules[hooks._AGENT_LOOP].AgentLoopManager, "generate_sequences"),
    ]
    for owner, name in wrapped:
        monkeypatch.setattr(owner, name, vars(owner)[name])
    derived = type("Derived", (classes["legacy"],), {"_validate": lambda self: {}})
    hooks.attach(SETTINGS, "grpo")
    assert is_wrapped(derived, "_validate")
    assert not is_wrapped(loops, "generate_sequences"), "trainers that await it would get no awaitable"
    hooks.attach(SETTINGS, "remax")
    for owner, name in wrapped:
        assert is_wrapped(owner, name), name


SETTINGS = load_config(
    {"sources": {"f": {"kind": "function", "function": "builtins:dict"}}, "judges": {"j": {"kind": "function"}}}
)


JUDGES = {name: {"kind": "function"} for name in ("quality", "watch")}
SCREENED = {
    "sources": {"f": {"kind": "function", "function": "builtins:dict"}},
    "judges": {**JUDGES, "safe": {"kind": "screen", "judge": "quality", "monitor": "watch", "at": 1}},
}


def test_without_hooks_only_what_needs_none_is_accepted(compose, tokenizer):
    """A program of one's own, or a version of verl that we do not know."""
    from verl.trainer.ppo.reward import load_reward_manager

    config = compose(OURS, "+qreward={}")
    mask, policy = (
        r"judges\.safe\.on: `mask` is impossible here.*Choose `floor`",
        r"`{}` is impossible here.*main_ppo.*or",
    )
    for on_failure, tree, problems in (
        ("auto", {}, [policy.format("auto")]),
        ("exclude", SCREENED, [mask, policy.format("exclude")]),
        ("raise", SCREENED, [mask]),
        ("raise", {}, []),
        ({"constant": 0}, {}, []),
    ):
        config.qreward = {"on_failure": on_failure, **tree}
        if not problems:
            load_reward_manager(config, tokenizer)
            continue
        with pytest.raises(ConfigurationError) as refused:
            load_reward_manager(config, tokenizer)
        for problem in problems:
            assert re.search(problem, str(refused.value))


@each_of(
    ("estimator", "override", "problem"),
    [
        ("gae", "algorithm.use_pf_ppo=True", r"algorithm\.use_pf_ppo"),
        ("remax", "reward.reward_model.enable=True", "`remax` subtracts the reward of a greedy response"),
    ],
)
def test_what_cannot_keep_failed_samples_out_is_refused(any_function, estimator, override, problem):
    overrides = [OURS, any_function, "trainer.use_v1=False", f"algorithm.adv_estimator={estimator}", override]
    with pytest.raises(ConfigurationError, match=f"`auto` is impossible here: {problem}"):
        FakeVerlTrainer(overrides)
    FakeVerlTrainer([*overrides, "+qreward.on_failure=raise"]).close()
