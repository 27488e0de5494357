"""From `--rm-type remote_rm` to qreward: one flag, the same rewards; and slime's own client asks `qreward serve`."""

from __future__ import annotations

import json

import pytest

from qreward_plugins.testing import JudgeServer
from tests.kit import Program

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


def test_slimes_client_of_reward_servers_asks_ours(player, tmp_path):
    scenario = Scenario("served", Judge(), "all", hook=False)
    config = tmp_path / "judges.yaml"
    with scenario.judge.start() as judge:
        config.write_text(json.dumps(scenario.config(judge.base_url)))
        with Program("-m", "qreward_plugins.cli", "serve", config, "--port", "0") as server:
            url = server.line("http").split()[3].rstrip(";")
            flags = ["--rm-url", f"{url}/slime", "--rm-type", "remote_rm"]
            played = play(scenario, player, tree={}, flags=flags, custom_rm=None)
    assert played.error is None, played.error_text
    assert all(sample.raw == sample.draft.reward for sample in played.steps[0].samples)
