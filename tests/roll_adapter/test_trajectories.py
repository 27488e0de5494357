"""Rewards of finished trajectories in agentic pipelines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from qreward_plugins import ConfigurationError, RewardMissing
from qreward_plugins.adapters import RunningMeans
from qreward_plugins.engine.process_portals import close_process_portals
from qreward_plugins.samples.check import Rejected, read_sample
from qreward_plugins.samples.images import Image
from qreward_plugins.testing import FakeTrajEnvManager
from roll_adapter import barrier
from tests.kit import each_of


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

    def make(*said: str, turns: int = 1, tree: Any = None, size: int = 1, mode: str = "train", **config: Any) -> Any:
        lines = iter(said)
        node = tree if tree is not None else make_tree()
        return Judged(
            env=Turns(turns),
            respond=lambda messages, rng: next(lines),
            env_config={"tag": "talk", "qreward": node, **config},
            group_size=size,
            mode=mode,
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


def cache_of(*turns: Any) -> Any:
    """A trajectory of turns, each with its response and messages."""
    history = [{"llm_response": said, "messages": messages} for said, messages in turns]
    return SimpleNamespace(history=history, tag="t", group_id=1, env_id=1)


def test_a_dialogue_that_cannot_be_read_is_the_failure_of_its_sample(manager_of) -> None:
    user, reply = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    for tool, problem in (
        ({"content": [{"output": "42"}]}, ""),
        ({"content": "", "tool_calls": [object()]}, "messages.tool_calls"),
    ):
        cache = cache_of(("a", [user, reply]), ("b", [{"role": "tool", **tool}, reply]))
        read = read_sample(manager_of("3").trajectory_sample(cache))
        assert problem in getattr(read, "problem", "")
        assert isinstance(read, Rejected) == bool(problem)


def test_a_manager_that_shows_the_whole_conversation_in_each_step_shows_it_once(manager_of) -> None:
    """As ROLL's `AgentNativeStepEnvManager`; examples of answers are part of the prompt."""
    manager = manager_of()
    example = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3?"},
    ]
    said = [*example, {"role": "assistant", "content": "3"}]
    more = [*said, {"role": "user", "content": "And 8?"}, {"role": "assistant", "content": "8"}]
    sample = manager.trajectory_sample(cache_of(("3", said), ("8", more)))
    assert sample.messages == example
    assert [turn["content"] for turn in sample.turns] == ["3", "And 8?", "8"]


def test_a_step_that_repeats_the_one_before_is_a_step_of_its_own(manager_of) -> None:
    """A policy that makes the same call again gets the same observation again."""
    said = [{"role": "user", "content": "Move."}, {"role": "assistant", "content": "left"}]
    sample = manager_of().trajectory_sample(cache_of(*[("left", list(said))] * 3))
    assert [turn["content"] for turn in sample.turns] == ["left", "Move.", "left", "Move.", "left"]


def test_what_later_turns_showed_is_of_the_response(manager_of) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    red, blue = (np.full((6, 8, 3), colour, dtype=np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))
    prompt = [
        {"role": "system", "content": "play"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "go"}]},
    ]
    history = [
        {"observation": {"prompt": prompt, "image": [red]}, "llm_response": "left", "messages": None},
        {"observation": blue, "llm_response": "right", "messages": None},
        {"observation": "over"},
    ]
    cache = SimpleNamespace(tag="maze", group_id=1, env_id=2, history=history)
    sample = manager_of().trajectory_sample(cache)
    assert [message["role"] for message in sample.messages] == ["system", "user"]
    assert Image.of(sample.messages[1]["content"][0]) == Image.of(pillow.fromarray(red))
    assert sample.response == "assistant: left\n\nuser: [image]\n\nassistant: right"
    assert sample.response_images == [Image.of(pillow.fromarray(blue))]


def test_in_parts_each_turn_adds_to_its_own_step(manager_of, make_tree, judge) -> None:
    """A manager with a row for each step, as ROLL's `StepEnvManager`: the judge's reward is where it was earned."""
    from qreward_plugins.testing.roll.protocol import RollDataProto

    turns = {"kind": "turns", "judge": "quality", "reduce": "sum"}
    tree = make_tree()
    tree = {**tree, "judges": {**tree["judges"], "whole": turns}, "dense": True}
    manager = manager_of("3", "8", turns=2, tree=tree, qreward_weight=0.5)
    base = type(manager).__mro__[2]
    with pytest.raises(ConfigurationError, match="dense: rewards cannot come in parts: this environment manager makes"):
        manager.play()

    def by_step(self: Any, cache: Any) -> Any:
        if "observation" in cache.history[-1]:
            cache.history.pop()
        rewards = torch.tensor([[turn["reward"]] for turn in cache.history])
        return RollDataProto.from_dict(
            {"scores": rewards, "response_mask": torch.ones(rewards.shape)}, {}, {"metrics": {}}
        )

    manager = manager_of("3", "8", turns=2, tree=tree, qreward_weight=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "formulate_rollouts", by_step)
        rollout = manager.play()
    assert rollout.batch["scores"][:, 0].tolist() == pytest.approx([0.125 + 0.5 * 0.3, 0.125 + 0.5 * 0.8])
    assert judge.report().requests == 4


def test_turns_that_end_at_the_same_place_have_their_own_parts() -> None:
    from roll_adapter.trajectories import _by_turn

    assert _by_turn([5, 5, 9], [(5, 1.0), (5, 2.0), (7, 4.0)], 3) == [1.0, 2.0, 4.0]


def test_a_constant_trains_and_raise_raises(manager_of, make_tree) -> None:
    rollout = manager_of("break", tree=make_tree(on_failure={"constant": -1.0})).play()
    assert scores(rollout) == pytest.approx(-0.875)
    assert int(rollout.batch["response_mask"].sum()) == 2
    with pytest.raises(RewardMissing, match="infra"):
        manager_of("break", tree=make_tree(on_failure="raise")).play()


@each_of("weight", [1e39, -1e300, float("inf"), float("nan")])
def test_what_would_be_infinite_in_32_bits_is_masked_and_adds_nothing(manager_of, weight) -> None:
    assert scores(manager_of("8", qreward_weight=0.5).play()) == pytest.approx(0.125 + 0.4)
    rollout = manager_of("8", qreward_weight=weight).play()
    assert scores(rollout) == pytest.approx(0.125)
    assert int(rollout.batch["response_mask"].sum()) == 0
    assert rollout.meta_info["metrics"]["env/talk/qreward_failed"] == 1.0


def test_the_configuration_may_be_a_file(manager_of, make_tree, tmp_path, monkeypatch) -> None:
    with pytest.raises(ConfigurationError, match=r"custom_envs\.talk\.qreward"):
        manager_of("8", tree={"sources": {}}).play()
    file = tmp_path / "judges.yaml"
    file.write_text(yaml.safe_dump(make_tree()))
    assert scores(manager_of("8", tree=str(file)).play()) == pytest.approx(0.925)
    monkeypatch.setenv("QREWARD_CONFIG", str(file))
    assert scores(manager_of("8", qreward=None).play()) == pytest.approx(0.925)


@pytest.mark.parametrize(
    ("workers", "others", "processes"),
    [((6, 2), {}, 8), ((3, 0), {"chat": {"deadline_s": 5.0}, "alike": None}, 6), ((2, 2), {}, None)],
)
def test_environment_workers_and_configurations_share_the_limits(
    manager_of, make_tree, workers, others, processes
) -> None:
    """Each configuration has an engine of its own in every process."""
    mine = make_tree()
    mine["sources"]["judge"]["limits"] = {"concurrency": 4}
    manager = manager_of("5", tree=mine)
    trees = {name: {"qreward": make_tree(engine=engine) if engine else mine} for name, engine in others.items()}
    envs = {"talk": {"qreward": mine}, "without": {}, **trees}
    train, val = (SimpleNamespace(world_size=size) for size in workers)
    manager.pipeline_config = SimpleNamespace(train_env_manager=train, val_env_manager=val, custom_envs=envs)
    if processes is None:
        assert scores(manager.play()) == pytest.approx(0.125 + 0.5)
        return
    with pytest.raises(ConfigurationError, match=f"cannot be shared by {processes} processes"):
        manager.play()


LONG_S = 60.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """The threads of an environment worker."""
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(barrier, "POLL_S", 0.01)
    monkeypatch.setattr(barrier, "_here", barrier.Barrier())


@pytest.fixture
def tree_of(make_tree) -> Any:
    """The configuration of one process of several: equal but for what tells their engines apart."""

    def tree(process: int = 0, wait_s: float = LONG_S, **changes: Any) -> Any:
        engine = {"max_attempts": 1, "seed": process, "deadline_s": 3.0}
        return make_tree(engine=engine, groups={"wait_s": wait_s}, **changes)

    return tree


@each_of(
    ("size", "siblings", "mean"),
    [
        # Each configuration has an engine of its own, as in processes of their own.
        (3, [("4", {"process": 1}), ("8", {"process": 2})], 0.6),
        # Groups of other episodes and seeds do not mix.
        (2, [("2", {"episode": 1}), ("4", {"group_seed": 7}), ("8", {})], 0.8),
        # A slow sibling leaves its place to whoever asks first (ROLL, `GroupQueue.get_episode_id`).
        (3, [("2", {"env_id": 1}), ("6", {"env_id": 1})], 0.4),
    ],
)
def test_a_failed_trajectory_gets_the_mean_of_siblings_that_are_scored_later(
    manager_of, tree_of, pool, monkeypatch, size, siblings, mean
) -> None:
    monkeypatch.setattr(barrier, "_here", barrier.Barrier())
    waiting = pool.submit(manager_of("break", tree=tree_of(), size=size).play)
    for said, options in siblings:
        place = {"env_id": 1, **options}
        episode, tree = place.pop("episode", 0), tree_of(place.pop("process", 0))
        rollout = manager_of(said, tree=tree, size=size, **place).play(episode_id=episode)
        assert scores(rollout) == pytest.approx(0.125 + int(said) / 10)
        assert int(rollout.batch["response_mask"].sum()) == 2
    rollout = waiting.result(LONG_S)
    assert scores(rollout) == pytest.approx(0.125 + mean)
    assert int(rollout.batch["response_mask"].sum()) == 0
    assert rollout.meta_info["metrics"]["env/talk/qreward_failed"] == 1.0


def test_siblings_that_never_come_are_waited_for_no_longer_than_that(manager_of, tree_of) -> None:
    tree = tree_of(wait_s=0.05)
    manager_of("8", tree=tree, size=3, env_id=1).play()
    assert scores(manager_of("break", tree=tree, size=3).play()) == pytest.approx(0.125 + 0.8)
    late = manager_of("2", tree=tree, size=3, env_id=2).play()
    assert scores(late) == pytest.approx(0.125 + 0.8), "the mean was given out and must not move"
    assert int(late.batch["response_mask"].sum()) == 0
    assert late.meta_info["metrics"]["env/talk/qreward_failed"] == 0.0


def test_a_redundant_trajectory_keeps_its_reward(manager_of, tree_of) -> None:
    """`group_size_redundancy` has more trajectories played than ROLL trains."""
    for env, said in enumerate(("2", "4", "9")):
        rollout = manager_of(said, tree=tree_of(), size=2, env_id=env).play()
        assert scores(rollout) == pytest.approx(0.125 + int(said) / 10)
        assert int(rollout.batch["response_mask"].sum()) == 2


@pytest.mark.parametrize("early", [False, True], ids=["while_it_waits", "before_it_waits"])
def test_stop_ends_the_waiting(manager_of, tree_of, pool, monkeypatch, early) -> None:
    asked = threading.Event()
    manager_of("8", tree=tree_of(), size=3, env_id=1).play()
    report = barrier.Barrier.report
    monkeypatch.setattr(barrier.Barrier, "report", lambda *args: asked.set() or report(*args))
    failed = manager_of("break", tree=tree_of(), size=3)
    if early:
        failed.stop()
    waiting = pool.submit(failed.play)
    asked.wait(LONG_S)
    failed.stop()
    assert scores(waiting.result(LONG_S)) == pytest.approx(0.125 + 0.8)


def test_a_validation_waits_for_nobody(manager_of, tree_of) -> None:
    manager_of("8", tree=tree_of(), size=3, env_id=1, mode="val").play()
    failed = manager_of("break", tree=tree_of(), size=3, mode="val").play()
    assert scores(failed) == pytest.approx(0.125 + 0.8)
    later = manager_of("2", tree=tree_of(), size=3, env_id=2, mode="val").play()
    assert scores(later) == pytest.approx(0.125 + 0.2), "a verdict is what it is"


def test_without_an_actor_a_failed_trajectory_gets_the_mean_of_its_process(
    manager_of, tree_of, monkeypatch, caplog
) -> None:
    lost = SimpleNamespace(report=lambda *_: 1 / 0)
    monkeypatch.setattr(barrier, "connect", lambda: lost)
    monkeypatch.setattr(barrier, "means", RunningMeans())
    for env, said in enumerate(("2", "6")):
        rollout = manager_of(said, tree=tree_of(), size=4, env_id=env).play()
        assert scores(rollout) == pytest.approx(0.125 + int(said) / 10)
    failed = manager_of("break", tree=tree_of(), size=4).play()
    assert scores(failed) == pytest.approx(0.125 + 0.4)
    assert int(failed.batch["response_mask"].sum()) == 0
    assert "the barrier of groups does not answer (ZeroDivisionError" in caplog.text
