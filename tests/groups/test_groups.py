"""The means of whole groups, which groups are worth training, and what trainers refuse or make of judges that compare
or score in parts.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qreward_plugins import Cause, ConfigurationError, Failed, GroupGate, JudgeUnavailable, group_means
from qreward_plugins.adapters import RunningMeans, mean_of, number_of
from qreward_plugins.bridges.scorer import Scorer
from qreward_plugins.config import Constant, Groups
from qreward_plugins.testing import FakeRollTrainer, JudgeServer, roll_stand_in
from slime_adapter.settings import adapter_of

from ..kit import FRAMEWORKS, by_word, each_of, make_config, play


@each_of(
    ("rewards", "groups", "means"),
    [
        ([0.2, None, 0.4, 1.0], "aaab", [0.3, 0.3, 0.3, 1.0]),
        # A group without rewards has the mean of everything, and without any reward there is one number.
        ([None, None, 0.5, 1.0], "aabb", [0.75] * 4),
        ([None, None], "ab", [0.0, 0.0]),
    ],
)
def test_means_are_over_the_scored_samples_of_each_group(rewards, groups, means):
    assert group_means(rewards, groups) == pytest.approx(means)


@each_of(
    ("min_scored", "size", "failed", "kept"),
    [
        # Two to compare, unless told otherwise; a group of one needs its one.
        *[("auto", 4, 2, True), ("auto", 4, 3, False), ("auto", 1, 0, True), ("auto", 1, 1, False)],
        *[("all", 4, 0, True), ("all", 4, 1, False), (3, 4, 1, True), (3, 4, 2, False), (3, 2, 0, True)],
    ],
)
def test_a_gate_keeps_groups_with_enough_rewards(min_scored, size, failed, kept):
    groups = Groups() if min_scored == "auto" else Groups(min_scored=min_scored)
    assert GroupGate(groups).admit(size, ["infra/deadline"] * failed) is kept


def test_a_gate_gives_up_after_so_many_in_a_row_and_says_why():
    gate = GroupGate(Groups(min_scored="all", give_up_after=3))
    for again in range(2):
        for _ in range(2):
            assert not gate.admit(2, ["infra/deadline", "infra/no_source"], detail="could not connect (refused)")
        if not again:
            assert gate.admit(2, []), "starts the count anew"
    with pytest.raises(
        JudgeUnavailable,
        match=r"3 groups .*infra/deadline 4 times, .* The last failure: could not connect \(refused\)\.",
    ):
        gate.admit(2, ["infra/deadline", "infra/deadline"])
    assert not gate.admit(2, ["infra/deadline"]), "who catches the error gets another full count"


def test_a_screened_sample_is_left_out_and_nothing_has_failed():
    screened, failed = Failed(Cause.POLICY, "screened"), Failed(Cause.INFRA, "deadline")
    for policy in ("auto", "raise", Constant(constant=-1.0)):
        assert number_of(screened, policy) is None
    assert number_of(failed, Constant(constant=-1.0)) == -1.0
    gate = GroupGate(Groups(give_up_after=1))
    assert not gate.admit(4, ["policy/screened"] * 2 + ["infra/deadline"])
    with pytest.raises(JudgeUnavailable):
        gate.admit(4, ["policy/screened"] + ["infra/deadline"] * 3)


@each_of("reward", [math.nan, math.inf, -math.inf])
def test_the_mean_of_a_group_can_be_asked_for_at_any_time_and_is_finite(reward):
    """NaN would become the mean of a whole group."""
    running = RunningMeans()
    assert running.mean("group") == 0.0
    running.add("group", 0.5)
    takes = [lambda: mean_of([0.5, reward]), lambda: group_means([reward], "a"), lambda: running.add("group", reward)]
    for take in takes:
        with pytest.raises(ValueError, match="finite"):
            take()
    assert running.mean("group") == 0.5
    running.add("group", 1.0, size=2)
    assert running.mean("group") == 0.0, "a group that is complete is forgotten"


def test_a_group_is_forgotten_when_its_last_sample_is_there_scored_or_failed():
    means, told = RunningMeans(), []
    means.add("g", 1.0, size=2)
    means.follow("g", told.append, size=2)
    assert told == [1.0]
    assert means.mean("g") == 0.0


# Trainers refuse what they cannot do before they train


MODEL = {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "judge"}
PRM = {"kind": "reward_model", "base_url": MODEL["base_url"], "model": "m", "protocol": "vllm_steps"}
PRM |= {"chat_template": "/nowhere", "step_separator": "."}
STEPS = {"sources": {"m": PRM}, "judges": {"steps": {"kind": "reward_model", "reduce": "min"}}, "dense": True}


def over_llm(kind: str) -> Any:
    return {"sources": {"m": MODEL}, "judges": {"each": {"kind": "llm"}, "whole": {"kind": kind, "judge": "each"}}}


def slime(tree: Any) -> None:
    adapter_of(SimpleNamespace(qreward=tree, group_rm=False))


def roll(tree: Any) -> None:
    worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [tree]}
    flags = {"adv_estimator": "grpo", "rollout_batch_size": 1, "is_num_return_sequences_expand": True}
    with roll_stand_in(over_installed=True), FakeRollTrainer({"judged": worker}, timeout_s=30.0, **flags) as trainer:
        trainer.step()


def openenv(tree: Any) -> None:
    Scorer(tree, "OpenEnv")


TURNS, DENSE = "the turns of a response are not known: ", "dense: rewards cannot come in parts: "


@pytest.mark.parametrize(
    ("start", "tree", "said"),
    [
        (slime, over_llm("turns"), f"{TURNS}slime has one text of a response"),
        (roll, STEPS, f"{DENSE}this pipeline of ROLL trains on one reward of a response"),
        (slime, over_llm("rank"), r"siblings cannot be compared: slime asks .* Set --group-rm"),
        (roll, over_llm("rank"), r"one by one, so siblings cannot be compared\. Set it to false"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused_with_the_reason(start: Any, tree: Any, said: str) -> None:
    with pytest.raises(Exception, match=said) as caught:
        start(tree)
    assert isinstance(caught.value, ConfigurationError) or "ConfigurationError" in str(caught.value)


# The kind `rank` in each framework: a group is one call, and its places become the advantages


def tree_of(server: Any) -> dict[str, Any]:
    judges = {"quality": {"kind": "llm"}, "reward": {"kind": "rank", "judge": "quality"}}
    return {**make_config({"a": server}, engine={"deadline_s": 30}), "judges": judges, "routes": {"*": "reward"}}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_places_in_a_group_become_advantages(framework: str) -> None:
    with JudgeServer(by_word) as server:
        step = play(framework, ["worth 1", "worth 9", "worth 3", "worth 3"], tree_of(server))
        assert server.report().requests == 1
    rewards = np.array([0.0, 1.0, 0.5, 0.5])
    assert step.rewards == pytest.approx(rewards)
    assert step.advantages == pytest.approx((rewards - 0.5) / (rewards.std(ddof=1) + 1e-6), abs=1e-5)
    assert not step.poisoned
