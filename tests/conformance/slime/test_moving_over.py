"""From `--rm-type remote_rm` to qreward: one flag, the same rewards."""

from __future__ import annotations

import pytest

from qreward_plugins.testing import JudgeServer

from ..judges import Judge, read_response
from ..scenarios import Scenario
from .checks import check
from .real import play


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
