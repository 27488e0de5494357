"""The mixin on ROLL's own trajectory env manager: judged rewards for the trajectories of an environment."""

from __future__ import annotations

import math

import pytest

from qreward_plugins.testing import JudgeServer

from ..checks import close
from ..judges import GROUP_SIZE, Judge, read_response, uneven
from ..scenarios import Scenario
from .scenarios import tree_of

TIMEOUT_S = 180.0
ENV_REWARD = 0.125
"""What the environment of `agentic` gives for a turn; that module imports ROLL."""


@pytest.fixture
def trajectories(player):
    """Play a group of environments over a judge. Returns the rollouts, or the error's name."""

    def play(score, *, episodes=1, per_worker=0):
        scenario = Scenario("agentic", Judge(), "any", engine={"deadline_s": 5.0, "max_attempts": 20})
        with JudgeServer(score) as judge:
            tree = tree_of(scenario, judge.base_url)
            tree["engine"]["shared"] = "off"
            keys = {"custom_envs": {"items": {"qreward": tree}}}
            keys["train_env_manager"] = {"max_env_num_per_worker": per_worker}
            reply = player.ask("trajectories", keys=keys, episodes=episodes, timeout_s=TIMEOUT_S)
        assert not reply.complaints, "\n".join(reply.complaints)
        return reply.result if reply.error is None else f"{reply.error}: {reply.text}"

    return play


def quality(call):
    return read_response(call.blocks["response"]).quality


def unless_uneven(call):
    return math.nan if uneven(read_response(call.blocks["response"])) else quality(call)


def draft_of(rollout):
    return read_response(rollout["text"][rollout["text"].rindex("item") :])


def assert_failed_have_the_mean(rollouts):
    """Each failed trajectory of each group adds the mean of all scored ones, and all have the same metrics."""
    for episode in {rollout["episode"] for rollout in rollouts}:
        group = [rollout for rollout in rollouts if rollout["episode"] == episode]
        scored = [rollout["episode_score"] for rollout in group if rollout["mask"]]
        assert all(rollout["mask"] or close(rollout["episode_score"], sum(scored) / len(scored)) for rollout in group)
    assert len({frozenset(rollout["metrics"]) for rollout in rollouts}) == 1


def test_a_finished_trajectory_gets_the_judges_reward_and_a_failed_one_is_masked(trajectories):
    rollouts = trajectories(unless_uneven, episodes=2)
    assert len(rollouts) == 2 * GROUP_SIZE
    for rollout in rollouts:
        draft = draft_of(rollout)
        assert draft.draft == rollout["env"]
        assert (not rollout["mask"]) == uneven(draft)
        assert close(rollout["score_sum"], rollout["episode_score"])
        assert uneven(draft) or close(rollout["episode_score"], ENV_REWARD + draft.reward)
        assert all(math.isfinite(value) for value in rollout["metrics"].values())
    assert_failed_have_the_mean(rollouts)


def test_the_trajectories_of_a_group_meet_though_workers_are_processes(trajectories):
    """The first worker's both fail, and what the other one's get is all there is to be told."""

    def score(call):
        return math.nan if read_response(call.blocks["response"]).draft < 2 else quality(call)

    rollouts = trajectories(score, episodes=3, per_worker=2)
    assert len(rollouts) == 3 * GROUP_SIZE
    assert [rollout["env"] for rollout in rollouts if not rollout["mask"]] == [0, 1] * 3
    assert_failed_have_the_mean(rollouts)
