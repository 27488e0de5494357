"""Every key of the recipes is one that ROLL has: its own reading drops others without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[3] / "recipes" / "roll"
ENVIRONMENT = {"QREWARD_CONFIG": str(RECIPES / "judges.yaml")}
"""What run.sh sets."""


def test_an_unknown_key_would_be_noticed(player, tmp_path):
    (tmp_path / "wrong.yaml").write_text("rollout_batch_sise: 3\n")
    reply = player.ask("strict", path=str(tmp_path / "wrong.yaml"), environment={})
    assert reply.error == "UnexpectedDataError"
    assert "rollout_batch_sise" in reply.text


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_every_key_of_a_recipe_is_rolls(player, name):
    assert player.must("strict", path=str(RECIPES / f"{name}.yaml"), environment=ENVIRONMENT) == "RLVRConfig"


def test_the_list_above_is_whole():
    runs = {path.stem for path in RECIPES.glob("*.yaml")} - {"base", "judges"}
    assert runs == {"grpo", "ppo"}
