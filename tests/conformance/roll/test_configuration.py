"""Where the configuration may stand in ROLL's."""

from __future__ import annotations

import json

from ..checks import close
from ..judges import Draft
from ..scenarios import UP as JUDGE
from ..scenarios import Scenario
from .real import scenario_keys
from .scenarios import DOMAIN, tree_of

UP = Scenario("up", JUDGE, "all")


def party(tree=None, **worker):
    """Keys for workers with this tree, or none, and these further keys of theirs."""
    keys = scenario_keys(UP, "http://127.0.0.1:9/v1")
    keys["rewards"][DOMAIN].update({"reward_manager_config": [] if tree is None else [tree], **worker})
    return keys


def test_a_file_serves_as_well_whichever_way_it_is_named(player, tmp_path):
    """In `reward_manager_config`, where inline keys win, and in the environment of the domain's workers."""
    with UP.judge.start() as judge:
        file = tmp_path / "judges.yaml"
        file.write_text(json.dumps(tree_of(UP, judge.base_url)))
        parties = {
            "path": party({"config": str(file), "judges": {"quality": {"reward_range": [0, 2]}}}),
            "environment": party(system_envs={"QREWARD_CONFIG": str(file)}),
        }
        wrong = player.must("hire", parties=parties)
        assert not any(wrong.values()), wrong
        for key, scale in (("path", 2), ("environment", 1)):
            (answer,) = player.must("score", key=key, requests=[[[5, 1]]])
            assert close(answer["rewards"][0], scale * Draft(5, 1).reward)
            player.must("let_go", key=key)
