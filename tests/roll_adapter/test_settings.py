"""Where the settings of a worker come from, what they are checked for, and who shares their limits."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from qreward_plugins import ConfigurationError
from roll_adapter.settings import load_settings
from tests.kit import each_of


def reward(*trees: Any, world_size: Any = 1, worker_cls: Any = "roll_adapter.QRewardWorker", **envs: str) -> Any:
    return SimpleNamespace(
        reward_manager_config=list(trees), world_size=world_size, worker_cls=worker_cls, system_envs=envs, name=None
    )


def tree(url: str = "http://judge.test/v1", **more: Any) -> dict[str, Any]:
    return {
        "sources": {"judge": {"kind": "openai", "base_url": url, "model": "judge"}},
        "judges": {"quality": {"kind": "llm"}},
        **more,
    }


MISSPELT = tree(engine={"deadline": 3}, judges={"quality": {"kind": "lllm"}})


@each_of(
    ("node", "told"),
    [
        # ROLL drops unknown keys, so a misspelt `reward_manager_config` looks like none.
        *[
            (node, ["rewards.maths.reward_manager_config", "may be misspelt", "[{config: /path/to/judges.yaml}]"])
            for node in (reward(), SimpleNamespace(reward_manager_config=None, system_envs=None), SimpleNamespace())
        ],
        (reward(tree(), tree()), ["rewards.maths.reward_manager_config", "has 2 trees"]),
        (SimpleNamespace(reward_manager_config=tree()), ["is a mapping, but ROLL's field is a list"]),
        (SimpleNamespace(reward_manager_config="judges.yaml"), ["is a str, but ROLL's field is a list"]),
        (
            reward(MISSPELT),
            ["2 mistakes in rewards.maths.reward_manager_config[0]", "judges.quality.kind", "engine.deadline"],
        ),
        (reward(tree("framework://reward/v1")), ["ROLL's domain maths has no server 'reward'", "Set judge_api_url"]),
    ],
)
def test_mistakes_are_told_with_their_path_and_what_to_write(monkeypatch, node, told) -> None:
    monkeypatch.delenv("QREWARD_CONFIG", raising=False)
    with pytest.raises(ConfigurationError) as raised:
        load_settings(node, domain="maths")
    text = " ".join(str(raised.value).split())
    assert [part for part in told if part not in text] == [], text


def test_a_key_among_the_variables_that_roll_prints_is_warned_of(caplog) -> None:
    node = reward(tree(), JUDGE_KEY="sk-never-shown", OTHER="1")
    with caplog.at_level(logging.WARNING, "roll_adapter"):
        load_settings(node, domain="maths")
    assert caplog.text == ""
    node.reward_manager_config[0]["sources"]["judge"]["api_key_env"] = "JUDGE_KEY"
    with caplog.at_level(logging.WARNING, "roll_adapter"):
        load_settings(node, domain="maths")
    assert "rewards.maths.system_envs has JUDGE_KEY, the key of the source judge" in caplog.text
    assert "never-shown" not in caplog.text


def test_the_deadline_is_cut_to_stay_below_rolls_own(caplog) -> None:
    node = reward(tree(engine={"deadline_s": 100}))
    with caplog.at_level(logging.WARNING, "roll_adapter"):
        assert load_settings(node, domain="d", rpc_timeout_s=50).engine.deadline_s == 40.0
    assert "engine.deadline_s of the domain d is reduced from 100 to 40 s" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "roll_adapter"):
        assert load_settings(node, domain="d", rpc_timeout_s=3600).engine.deadline_s == 100.0
        assert load_settings(node, domain="d").engine.deadline_s == 100.0
    assert caplog.text == ""


def test_mistakes_name_the_right_one_of_several_domains(make_tree) -> None:
    from qreward_plugins.testing import FakeRollTrainer

    trees = {"fine": make_tree(), "wrong": make_tree(on_failure="explode")}
    worker = "roll_adapter.QRewardWorker"
    rewards = {name: {"worker_cls": worker, "reward_manager_config": [tree]} for name, tree in trees.items()}
    with pytest.raises(ConfigurationError, match=r"rewards.wrong.reward_manager_config\[0\]"):
        FakeRollTrainer(rewards)


def test_the_workers_of_all_our_domains_share_limits() -> None:
    from roll_adapter.worker import processes_of

    rewards = {
        "a": reward(tree(), world_size=2),
        "b": reward({"config": "/no/such/file.yaml"}, world_size=3, worker_cls="roll_adapter.worker.QRewardWorker"),
        "c": reward(tree(), world_size=8, worker_cls="my_rewards.Rule"),
        "d": reward(tree(), world_size=None),
    }
    assert processes_of(rewards) == 2 + 3 + 1


def test_the_limits_of_a_source_are_divided_between_workers(train, words, make_tree, judge) -> None:
    node = make_tree()
    node["sources"]["judge"]["limits"] = {"concurrency": 4}
    trainer = train(words("1", "2", "3", "4"), tree=node, reward={"world_size": 4}, is_num_return_sequences_expand=True)
    judge.hold()
    running = trainer.start_step()
    judge.wait_for(lambda report: report.in_flight == 4)
    judge.release()
    assert running.result(20).raw_rewards == pytest.approx([0.1, 0.2, 0.3, 0.4] * 2)
    # Two samples for each worker, and one slot of the four.
    assert judge.report().peak_concurrency == 4


def test_the_address_that_roll_knows_takes_the_place_of_its_name() -> None:
    config = reward(tree("framework://reward/v1"))
    config.judge_api_url = "http://judge.test:8000"
    assert load_settings(config, domain="maths").sources["judge"].urls == ("http://judge.test:8000/v1",)
