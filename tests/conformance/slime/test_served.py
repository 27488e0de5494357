"""slime's own client of reward servers asks `qreward serve`."""

from __future__ import annotations

import json

from tests.kit import Program

from ..judges import Judge
from ..scenarios import Scenario
from .real import play


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
