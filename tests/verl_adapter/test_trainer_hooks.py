"""What is done in the trainer's process: with verl's own classes, but for the trainer around them."""

from __future__ import annotations

import importlib
import re
import sys
import threading
import warnings

import pytest

from qreward_plugins import ConfigurationError, load_config
from qreward_plugins.testing import FakeVerlTrainer
from verl_adapter import trainer_hooks
from verl_adapter.trainers import LEGACY_MODULE, V1_MODULE, calling_trainer, is_wrapped

from ..kit import each_of

OURS = "reward.reward_manager.name=qreward"


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
    names = [
        *trainer_hooks._COMPUTES.values(),
        *((module, "process_validation_metrics") for module in (V1_MODULE, LEGACY_MODULE)),
    ]
    for module, name in names:
        monkeypatch.setattr(sys.modules[module], name, getattr(sys.modules[module], name))
    methods = [(V1_MODULE, "PPOTrainer", "_compute_reward_colocate"), (LEGACY_MODULE, "RayPPOTrainer", "_validate")]
    methods += [(trainer_hooks._REPLAY_BUFFER, "ReplayBuffer", "_dapo_filtered_keys")]
    methods += [(trainer_hooks._REWARD_LOOP, "RewardLoopManager", "compute_rm_score")]
    methods += [(trainer_hooks._AGENT_LOOP, "AgentLoopManager", "generate_sequences")]
    for module, cls, name in methods:
        owner = getattr(sys.modules[module], cls)
        monkeypatch.setattr(owner, name, vars(owner)[name])
    derived = type("Derived", (classes["legacy"],), {"_validate": lambda self: {}})
    trainer_hooks.attach(SETTINGS, "grpo")
    assert is_wrapped(derived, "_validate")
    loops = sys.modules[trainer_hooks._AGENT_LOOP].AgentLoopManager
    assert not is_wrapped(loops, "generate_sequences"), "trainers that await it would get no awaitable"
    trainer_hooks.attach(SETTINGS, "remax")
    for module, name in names:
        assert is_wrapped(sys.modules[module], name)
    for module, cls, name in methods:
        assert is_wrapped(getattr(sys.modules[module], cls), name), name


SETTINGS = load_config(
    {"sources": {"f": {"kind": "function", "function": "math:fsum"}}, "judges": {"j": {"kind": "function"}}}
)


JUDGES = {name: {"kind": "function"} for name in ("quality", "watch")}
SCREENED = {
    "sources": {"f": {"kind": "function", "function": "math:fsum"}},
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
def test_what_cannot_keep_failed_samples_out_is_refused(tmp_path, estimator, override, problem):
    path = tmp_path / "mine.py"
    path.write_text("def compute_score(**_):\n    return 0.0\n")
    overrides = [OURS, "trainer.use_v1=False", f"algorithm.adv_estimator={estimator}", override]
    overrides += [f"reward.custom_reward_function.path={path}"]
    with pytest.raises(ConfigurationError, match=f"`auto` is impossible here: {problem}"):
        FakeVerlTrainer(overrides)
    FakeVerlTrainer([*overrides, "+qreward.on_failure=raise"]).close()
