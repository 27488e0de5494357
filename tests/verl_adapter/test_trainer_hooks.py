"""What is done in the trainer's process: with verl's own classes, but for the trainer around them."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import sys
import threading
import warnings

import pytest

from qreward_plugins import ConfigurationError, load_config
from qreward_plugins.testing import FakeVerlTrainer
from qreward_plugins.testing.verl.data import collate
from qreward_plugins.testing.verl.protocol import pad_to_divisor
from verl_adapter import trainer_hooks, validation
from verl_adapter.metrics import RewardLog
from verl_adapter.rollouts import PADDING, VALIDATION, is_padding, to_sample
from verl_adapter.trainers import LEGACY_MODULE, V1_MODULE, calling_trainer

from .conftest import said

OURS = "reward.reward_manager.name=qreward"
FACTS = {
    **dict.fromkeys(("floor", "attempts", "latency_s", "tokens", "cost_usd", "cached", "cut", "failed"), 0.0),
    **dict.fromkeys(("cause", "source", "waited"), ""),
    "reward": 0.5,
    "data_source": "sums",
}


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
    names = [*trainer_hooks._COMPUTES.values(), *((module, "process_validation_metrics") for module, _ in VALIDATES)]
    for module, name in names:
        monkeypatch.setattr(sys.modules[module], name, getattr(sys.modules[module], name))
    methods = [(V1_MODULE, "PPOTrainer", "_compute_reward_colocate"), (LEGACY_MODULE, "RayPPOTrainer", "_validate")]
    methods += [(trainer_hooks._REPLAY_BUFFER, "ReplayBuffer", "_dapo_filtered_keys")]
    methods += [(trainer_hooks._REWARD_LOOP, "RewardLoopManager", "compute_rm_score")]
    methods += [(trainer_hooks._AGENT_LOOP, "AgentLoopManager", "generate_sequences")]
    for module, cls, name in methods:
        owner = getattr(sys.modules[module], cls)
        monkeypatch.setattr(owner, name, vars(owner)[name])
    generate = vars(sys.modules[trainer_hooks._AGENT_LOOP].AgentLoopManager)["generate_sequences"]
    trainer_hooks.attach(SETTINGS, "grpo")
    now = vars(sys.modules[trainer_hooks._AGENT_LOOP].AgentLoopManager)["generate_sequences"]
    assert now is generate, "trainers that await it would get no awaitable"
    trainer_hooks.attach(SETTINGS, "remax")
    for module, name in names:
        assert trainer_hooks._is_wrapped(sys.modules[module], name)
    for module, cls, name in methods:
        assert trainer_hooks._is_wrapped(getattr(sys.modules[module], cls), name), name


VALIDATES = trainer_hooks._VALIDATES
SETTINGS = load_config(
    {"sources": {"f": {"kind": "function", "function": "math:fsum"}}, "judges": {"j": {"kind": "function"}}}
)


@pytest.mark.parametrize(
    ("name", "overrides"), [("v1", ()), ("legacy", ("trainer.use_v1=False",)), ("one_step_off", ())]
)
def test_reward_workers_are_told_which_trainer_they_work_for(name, overrides):
    experimental = name if name == "one_step_off" else None
    grpo = ["algorithm.adv_estimator=grpo", "reward.num_workers=2"]
    with FakeVerlTrainer([*grpo, OURS, *overrides], experimental=experimental, reward=lambda **_: 1.0) as fake:
        told = [manager.config.qreward_trainer for manager in fake.reward_managers]
        assert told == [{"name": name, "tells_phases": False}] * 2
        assert "qreward_trainer" not in fake.config
    with FakeVerlTrainer(grpo, experimental=experimental, reward=lambda **_: 1.0) as fake:
        assert all("qreward_trainer" not in manager.config for manager in fake.reward_managers)


@pytest.mark.parametrize("policy", ["auto", "neutral", "exclude", "raise", "{constant: 0}"])
@pytest.mark.parametrize("screens", [False, True])
def test_without_hooks_only_what_needs_none_is_accepted(compose, tokenizer, policy, screens):
    """A program of one's own, or a version of verl that we do not know."""
    from verl.trainer.ppo.reward import load_reward_manager

    judges = ["+qreward.sources.f={kind: function, function: 'math:fsum'}"]
    judges += [f"+qreward.judges.{name}={{kind: function}}" for name in ("quality", "watch")]
    judges += ["+qreward.judges.safe={kind: screen, judge: quality, monitor: watch, at: 1}"]
    problems = [r"judges\.safe\.on: `mask` is impossible here.*Choose `floor`"] if screens else []
    if policy in ("auto", "neutral", "exclude"):
        problems += [rf"`{policy}` is impossible here.*main_ppo.*`{{constant: x}}`, or"]
    config = compose(OURS, f"+qreward.on_failure={policy}", *(judges if screens else []))
    if not problems:
        load_reward_manager(config, tokenizer)
        return
    with pytest.raises(ConfigurationError) as refused:
        load_reward_manager(config, tokenizer)
    for problem in problems:
        assert re.search(problem, str(refused.value))


def test_what_draws_rows_anew_is_refused():
    overrides = ["algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=True"]
    play = {"reward": lambda **_: 1.0}
    with pytest.raises(ConfigurationError, match=r"`auto` is impossible here: algorithm\.use_pf_ppo"):
        FakeVerlTrainer([OURS, "trainer.use_v1=False", *overrides], **play)
    FakeVerlTrainer([OURS, "trainer.use_v1=False", *overrides, "+qreward.on_failure=raise"], **play).close()


def test_metrics_are_of_what_was_added_since_the_last():
    log = RewardLog()

    def infos(*rows):
        return [("u", {f"qreward/{name}": value for name, value in {**FACTS, **row}.items()}) for row in rows]

    assert log.since_last() == {}
    failed = {"failed": 1.0, "cause": "infra/deadline", "score/style": float("nan")}
    slow = {"waited": json.dumps({"blame_s/judge/queue": 2.0}), "score/style": 0.5}
    log.add("train", infos(failed, slow, {"waited": json.dumps({"blame_s/judge/queue": 1.0})}, {"cut": 1.0}))
    log.add("train", [("u", {"reward_of_an_agent_loop": 1.0})])
    metrics = log.since_last()
    wanted = {"samples": 4, "failed_rate": 0.25, "failed/infra": 1, "cut_rate": 0.25, "score/style": 0.5}
    wanted |= {"reward/mean": 0.5, "flat_rate": 1.0, "data/sums/reward": 0.5}
    assert {name: metrics[f"qreward/{name}"] for name in wanted} == wanted
    assert metrics["qreward/blame_s/judge/queue"] == 2.0, "the longest batch"
    assert log.since_last() == {}
    log.add("val", infos(failed, slow))
    log.add_unscored_prompts(1)
    metrics = log.since_last()
    assert (metrics["qreward/val/failed_rate"], metrics["qreward/val/unscored_prompts"]) == (0.5, 1)
    assert not any("blame_s" in name or name == "qreward/samples" for name in metrics)


@pytest.mark.parametrize("infos", [[{"index": 1}, None, {"index": 3}], None])
def test_rows_with_which_verl_fills_up_a_batch_are_marked(make_data, infos):
    data = make_data(["a", "b", "c"], columns={"extra_info": infos} if infos else {})
    if infos is None:
        del data.non_tensor_batch["extra_info"]
    padded, count = validation.marking_padding(pad_to_divisor)(data, 8)
    assert (len(padded), count) == (8, 5)
    assert [is_padding(padded[row]) for row in range(8)] == [False] * 3 + [True] * 5
    if infos:
        assert padded.non_tensor_batch["extra_info"].tolist()[:4] == [*infos, {"index": 1, PADDING: True}]
        assert data.non_tensor_batch["extra_info"].tolist() == infos
    same, count = validation.marking_padding(pad_to_divisor)(data, 3)
    assert (same is data, count) == (True, 0)


def test_rows_of_validation_are_marked_and_no_other_column_is_touched(make_data):
    marked = pickle.loads(pickle.dumps(validation.MarkedRows(collate)))
    rows = [{"data_source": "a", "extra_info": {"index": 1}}, {"data_source": "b", "extra_info": {"index": 2}}]
    columns = marked(rows)
    assert columns["extra_info"].tolist() == [{"index": 1, VALIDATION: True}, {"index": 2, VALIDATION: True}]
    assert columns["data_source"].tolist() == ["a", "b"]
    assert rows[0]["extra_info"] == {"index": 1}
    assert marked([{"data_source": "a"}])["extra_info"].tolist() == [{VALIDATION: True}]
    sample = to_sample(make_data(["x"], columns={"extra_info": columns["extra_info"][:1]})[0], said("x"))
    assert (sample.split, VALIDATION in sample.extras) == ("val", False)
