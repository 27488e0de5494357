"""The recipes on ROLL itself: its own reading drops keys that it does not know without a word."""

from __future__ import annotations

import pytest

from ..recipes import RECIPES, dry_run


@pytest.mark.parametrize("name", ["grpo", "ppo", "ppo_sleeping"])
def test_a_dry_run_knows_every_key_and_finds_nothing_missing_but_what_a_cpu_lacks(roll_source, tmp_path, name):
    (tmp_path / "model").mkdir()
    environment = {
        "PYTHONPATH": str(RECIPES.parent),
        "HOME": str(tmp_path),
        "ROLL_DIR": str(roll_source),
        "PRETRAIN": str(tmp_path / "model"),
        "OUTPUT_DIR": str(tmp_path / "output"),
    }
    failed = dry_run("roll", name, tmp_path, environment)
    # The environment of these tests has no GPU, no engine and no tensorboard.
    assert {"GPUs"} <= failed <= {"GPUs", "rollout engine", "logger"}
    assert {path.name for path in tmp_path.iterdir()} == {"model"}, "a dry run writes nothing"
