"""From `--rm-type remote_rm` to qreward: one flag, the same rewards."""

from __future__ import annotations

import json

import pytest

from qreward_plugins.testing import JudgeServer

from ..judges import GROUP_SIZE, GROUPS, Judge, read_response
from ..scenarios import Scenario
from .checks import check
from .real import play

SCENARIO = Scenario("remote", Judge(), "all")


def rewards(played):
    (step,) = played.steps
    return {sample.draft: (sample.reward, sample.raw, sample.trained, sample.mask) for sample in step.samples}


@pytest.mark.parametrize("key", [None, "score"])
def test_slimes_own_remote_reward_model_and_then_the_flag_that_replaces_it(player, key):
    def score(call):
        reward = read_response(call.response).reward
        return {"score": reward, "length": 1.0} if key else reward

    scenario = Scenario("remote", Judge(), "all", hook=False, reward_key=key)
    with JudgeServer(score) as server:
        url = ["--rm-url", server.score_url]
        before = play(scenario, player, tree={}, flags=[*url, "--rm-type", "remote_rm"], custom_rm=None)
        after = play(scenario, player, tree={}, flags=url)
    assert before.error is None, before.error_text
    check(scenario, after)
    for draft, (reward, *trained) in rewards(before).items():
        moved, *moved_trained = rewards(after)[draft]
        assert moved_trained == trained
        assert reward.items() <= moved.items() if key else reward == moved, "what the server said is still there"


def test_the_configuration_may_come_from_the_environment(new_player, tmp_path):
    with Judge().start() as judge:
        path = tmp_path / "qreward.yaml"
        path.write_text(json.dumps(SCENARIO.config(judge.base_url)))
        played = play(SCENARIO, new_player, tree={}, env={"QREWARD_CONFIG": str(path)})
        check(SCENARIO, played)
        assert judge.server.report().answered == GROUPS * GROUP_SIZE
