"""Where the settings of a worker come from, what they are checked for, and who shares their limits."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from qreward_plugins import ConfigurationError
from roll_adapter.settings import load_settings
from tests.kit import each_of


def reward(*trees: Any, **envs: str) -> Any:
    return SimpleNamespace(reward_manager_config=list(trees), system_envs=envs)


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
        *[
            (SimpleNamespace(reward_manager_config=config), ["reward_manager_config: must be a list with one tree"])
            for config in ([tree(), tree()], tree(), "judges.yaml")
        ],
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


def test_the_deadline_must_stay_below_rolls_own() -> None:
    node = reward(tree(engine={"deadline_s": 100}))
    with pytest.raises(ConfigurationError, match=r"engine.deadline_s: ROLL ends the training .*Set it to 40 or less"):
        load_settings(node, domain="d", rpc_timeout_s=50)
    for timeout_s in (3600, None):
        assert load_settings(node, domain="d", rpc_timeout_s=timeout_s).engine.deadline_s == 100.0


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


def test_the_environment_of_the_worker_may_name_the_file(tmp_path) -> None:
    (tmp_path / "judges.yaml").write_text(json.dumps(tree(engine={"deadline_s": 7})))
    assert load_settings(reward(QREWARD_CONFIG=str(tmp_path / "judges.yaml")), domain="d").engine.deadline_s == 7


def test_the_address_that_roll_knows_takes_the_place_of_its_name() -> None:
    config = reward(tree("framework://reward/v1"))
    config.judge_api_url = "http://judge.test:8000"
    assert load_settings(config, domain="maths").sources["judge"].urls == ("http://judge.test:8000/v1",)
