"""From `--rm-type remote_rm` to qreward: one flag, the same rewards."""

from __future__ import annotations

import json

import pytest

from ..judges import GROUP_SIZE, GROUPS, Judge
from ..scenarios import Scenario
from .checks import check
from .real import play
from .servers import ScoreServer

SCENARIO = Scenario("remote", Judge(), "all")


def rewards(played):
    (step,) = played.steps
    return {sample.draft: (sample.reward, sample.raw, sample.trained, sample.mask) for sample in step.samples}


@pytest.fixture
def remote(player):
    """Play slime's own remote reward model, and then the flag that replaces it."""

    def play_both(server, **fields):
        scenario = Scenario("remote", Judge(), "all", **fields)
        url = ["--rm-url", server.url]
        before = play(scenario, player, tree={}, flags=[*url, "--rm-type", "remote_rm"], custom_rm=None)
        after = play(scenario, player, tree={}, flags=url)
        return scenario, before, after

    return play_both


def test_a_number(remote):
    with ScoreServer() as server:
        scenario, before, after = remote(server, hook=False)
    assert before.error is None, before.error_text
    check(scenario, after)
    assert rewards(after) == rewards(before)


def test_a_mapping_and_a_reward_key(remote):
    with ScoreServer(mapping=True) as server:
        scenario, before, after = remote(server, hook=False, reward_key="score")
    assert before.error is None, before.error_text
    check(scenario, after)
    for draft, (reward, *trained) in rewards(before).items():
        moved, *moved_trained = rewards(after)[draft]
        assert moved_trained == trained
        assert reward.items() <= moved.items(), "what the server said is still there"


def test_the_configuration_may_come_from_the_environment(new_player, tmp_path):
    with Judge().start() as judge:
        path = tmp_path / "qreward.yaml"
        path.write_text(json.dumps(SCENARIO.config(judge.base_url)))
        played = play(SCENARIO, new_player, tree={}, env={"QREWARD_CONFIG": str(path)})
        check(SCENARIO, played)
        assert judge.server.report().answered == GROUPS * GROUP_SIZE
