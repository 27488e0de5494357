"""Every key of the recipes is one that ROLL has: its own reading drops others without a word."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ..recipes import ENDPOINTS, RECIPES, dry_run, prepared

HERE = RECIPES / "roll"
ENVIRONMENT = {"QREWARD_CONFIG": str(HERE / "judges.yaml")}
"""What run.sh sets."""


def test_an_unknown_key_would_be_noticed(player, tmp_path):
    (tmp_path / "wrong.yaml").write_text("rollout_batch_sise: 3\n")
    reply = player.ask("strict", path=str(tmp_path / "wrong.yaml"), environment={})
    assert reply.error == "UnexpectedDataError"
    assert "rollout_batch_sise" in reply.text


@pytest.mark.parametrize("name", ["grpo", "ppo", "ppo_sleeping"])
def test_every_key_of_a_recipe_is_rolls(player, name):
    assert player.must("strict", path=str(HERE / f"{name}.yaml"), environment=ENVIRONMENT) == "RLVRConfig"


def test_roll_reads_the_data_set_that_the_script_makes(player, tmp_path):
    data = prepared("roll", tmp_path)
    rows = player.must("data_set", path=str(data), tags={"sums": "judged"}, template="qwen2_5")
    assert [(row["domain"], row["ground_truth"], row["id"]) for row in rows] == [
        ("judged", str(number + 1), str(number)) for number in range(3)
    ]
    assert "What is 0+1?" in rows[0]["text"]


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_dry_run_finds_nothing_missing_but_what_a_cpu_lacks(roll_source, tmp_path, name):
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


def test_a_tree_that_is_in_no_list_is_told_with_its_key(roll_source, tmp_path):
    for file in HERE.glob("*.yaml"):
        (tmp_path / file.name).write_text(file.read_text().replace("- config: ${oc", "config: ${oc"))
    paths = {"PRETRAIN": str(tmp_path), "OUTPUT_DIR": str(tmp_path), "QREWARD_CONFIG": str(tmp_path / "judges.yaml")}
    command = ["--offline", "roll", str(tmp_path), "grpo", str(roll_source)]
    done = subprocess.run(
        [sys.executable, str(RECIPES / "dry_run.py"), *command],
        env={
            **os.environ,
            **ENDPOINTS,
            **paths,
            "PYTHONPATH": os.pathsep.join((str(RECIPES.parent), str(roll_source))),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = " ".join(done.stdout.split())
    assert "rewards.judged.reward_manager_config: is a mapping, but ROLL's field is a list with one tree" in told, told
    assert "reward_manager_config: [{config: /path/to/judges.yaml}]" in told
