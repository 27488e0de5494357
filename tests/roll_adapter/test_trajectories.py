"""Rewards of finished trajectories in agentic pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from qreward_plugins import ConfigurationError, RewardMissing
from qreward_plugins.portal import close_process_portals
from qreward_plugins.testing import FakeTrajEnvManager


@pytest.fixture(autouse=True)
def no_portal_is_left() -> Iterator[None]:
    yield
    close_process_portals()


class Turns:
    """As many turns as it is told; each gives 0.125."""

    def __init__(self, turns: int = 1) -> None:
        self.left = self.turns = turns

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.left = self.turns
        return "How much?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return "And now?", 0.125, self.left == 0, False, {"metrics": {"asked": 1.0}}


@pytest.fixture
def manager_of(make_tree) -> Any:
    from roll_adapter import QRewardTrajectoryMixin

    class Judged(QRewardTrajectoryMixin, FakeTrajEnvManager):
        pass

    def make(*said: str, turns: int = 1, tree: Any = None, **config: Any) -> Any:
        lines = iter(said)
        node = tree if tree is not None else make_tree()
        return Judged(
            env=Turns(turns),
            respond=lambda messages, rng: next(lines),
            env_config={"tag": "talk", "qreward": node, **config},
        )

    return make


def scores(rollout: Any) -> float:
    return float(rollout.batch["scores"].sum())


def test_the_judges_reward_is_added_to_that_of_the_last_step(manager_of, judge) -> None:
    rollout = manager_of("8").play()
    assert judge.report().requests == 1
    assert scores(rollout) == pytest.approx(0.125 + 0.8)
    assert rollout.non_tensor_batch["step_scores"].tolist() == [[pytest.approx(0.925)]]
    metrics = rollout.meta_info["metrics"]
    assert (metrics["env/talk/qreward_reward"], metrics["env/talk/qreward_failed"]) == (0.8, 0.0)
    assert metrics["env/talk/asked"] == 1.0
    assert metrics["env/talk/qreward_latency_s"] > 0
    assert int(rollout.batch["response_mask"].sum()) == 2


def test_what_the_judge_sees_of_a_dialogue(manager_of) -> None:
    manager = manager_of("3", "8", turns=2, group_id=4, env_id=2)
    seen: list[Any] = []
    own = manager.trajectory_sample

    def watch(cache: Any) -> Any:
        seen.append(own(cache))
        return seen[-1]

    manager.trajectory_sample = watch
    manager.play(episode_id=6)
    (sample,) = seen
    assert [message["role"] for message in sample.messages] == ["system", "user"]
    assert sample.messages[1]["content"] == "How much?"
    assert sample.response == "assistant: 3\n\nuser: And now?\n\nassistant: 8"
    assert (sample.data_source, sample.group_id, sample.id) == ("talk", "talk/4/6", "talk/4/6/2")
    assert sample.extras == {"steps": 2, "env_rewards": [0.125, 0.125]}


def test_what_is_seen_can_be_chosen(manager_of) -> None:
    from dataclasses import replace

    manager = manager_of("3", "8", turns=2)
    own = manager.trajectory_sample
    manager.trajectory_sample = lambda cache: replace(own(cache), response="6")
    assert scores(manager.play()) == pytest.approx(0.25 + 0.6)


def test_a_weight(manager_of) -> None:
    assert scores(manager_of("8", qreward_weight=0.5).play()) == pytest.approx(0.125 + 0.4)
    assert scores(manager_of("8", qreward_weight=0).play()) == pytest.approx(0.125)


def test_a_failed_trajectory_is_masked_and_adds_the_mean_of_its_group(manager_of, make_tree) -> None:
    # The third failure in a row leaves the judge to probes, which go on until the deadline of what waits.
    tree = make_tree(engine={"max_attempts": 1, "seed": 1, "deadline_s": 3.0})
    manager_of("4", tree=tree, group_id=11).play()
    manager_of("8", tree=tree, group_id=11, env_id=1).play()
    failed = manager_of("break", tree=tree, group_id=11, env_id=2).play()
    assert scores(failed) == pytest.approx(0.125 + 0.6)
    assert int(failed.batch["response_mask"].sum()) == 0
    assert failed.meta_info["metrics"]["env/talk/qreward_failed"] == 1.0
    alone = manager_of("break", tree=tree, group_id=12).play()
    assert scores(alone) == pytest.approx(0.125)
    other_episode = manager_of("break", tree=tree, group_id=11, env_id=3).play(episode_id=1)
    assert scores(other_episode) == pytest.approx(0.125)


def test_a_constant_trains_and_raise_raises(manager_of, make_tree) -> None:
    rollout = manager_of("break", tree=make_tree(on_failure={"constant": -1.0})).play()
    assert scores(rollout) == pytest.approx(-0.875)
    assert int(rollout.batch["response_mask"].sum()) == 2
    with pytest.raises(RewardMissing, match="infra"):
        manager_of("break", tree=make_tree(on_failure="raise")).play()


@pytest.mark.parametrize("weight", [1e39, -1e300, float("inf"), float("nan")])
def test_what_would_be_infinite_in_32_bits_is_masked_and_adds_nothing(manager_of, weight) -> None:
    rollout = manager_of("8", qreward_weight=weight).play()
    assert scores(rollout) == pytest.approx(0.125)
    assert int(rollout.batch["response_mask"].sum()) == 0
    assert rollout.meta_info["metrics"]["env/talk/qreward_failed"] == 1.0


def test_the_configuration_may_be_a_file(manager_of, make_tree, tmp_path, monkeypatch) -> None:
    file = tmp_path / "judges.yaml"
    file.write_text(yaml.safe_dump(make_tree()))
    assert scores(manager_of("8", tree=str(file)).play()) == pytest.approx(0.925)
    monkeypatch.setenv("QREWARD_CONFIG", str(file))
    assert scores(manager_of("8", qreward=None).play()) == pytest.approx(0.925)


def test_a_mistake_has_its_path(manager_of) -> None:
    with pytest.raises(ConfigurationError, match=r"custom_envs\.talk\.qreward"):
        manager_of("8", tree={"sources": {}}).play()


def test_a_trajectory_that_ends_in_a_full_context(manager_of, make_tree) -> None:
    from roll_adapter import QRewardTrajectoryMixin

    class Judged(QRewardTrajectoryMixin, FakeTrajEnvManager):
        pass

    lines = iter(["7", None])
    manager = Judged(
        env=Turns(3), respond=lambda messages, rng: next(lines), env_config={"tag": "talk", "qreward": make_tree()}
    )
    rollout = manager.play()
    assert rollout.non_tensor_batch["step_scores"].tolist() == [[pytest.approx(0.825)]]


def test_all_managers_of_a_process_share_an_engine(manager_of, judge) -> None:
    from qreward_plugins import process_portal

    first, second = manager_of("8"), manager_of("6", env_id=1)
    first.play()
    second.play()
    assert process_portal(first._qreward_settings) is process_portal(second._qreward_settings)


def test_environment_workers_share_the_limits(manager_of, make_tree) -> None:
    tree = make_tree()
    for source in tree["sources"].values():
        source["limits"] = {"concurrency": 4}
    manager = manager_of("5", "5", tree=tree)
    manager.pipeline_config = SimpleNamespace(
        train_env_manager=SimpleNamespace(world_size=6), val_env_manager=SimpleNamespace(world_size=2)
    )
    with pytest.raises(ConfigurationError, match="cannot be shared by 8 processes"):
        manager.play()
    manager.pipeline_config.train_env_manager.world_size = 2
    assert scores(manager.play()) == pytest.approx(0.125 + 0.5)


def test_environments_with_other_settings_for_the_same_source_share_its_limits(manager_of, make_tree) -> None:
    """Each configuration has an engine of its own in every process."""
    mine, again, elsewhere = make_tree(), make_tree(engine={"deadline_s": 5.0}), make_tree()
    mine["sources"]["judge"]["limits"] = {"concurrency": 4}
    elsewhere["sources"]["judge"]["model"] = "another"
    manager = manager_of("5", tree=mine)
    manager.pipeline_config = SimpleNamespace(
        train_env_manager=SimpleNamespace(world_size=3),
        val_env_manager=SimpleNamespace(world_size=0),
        custom_envs={
            "talk": {"qreward": mine},
            "chat": {"qreward": again},
            "chat-too": {"qreward": again},
            "alike": {"qreward": mine},
            "elsewhere": {"qreward": elsewhere},
            "without": {},
        },
    )
    with pytest.raises(ConfigurationError, match="cannot be shared by 6 processes"):
        manager.play()
