"""Every key of the recipes is one that ROLL has: its own reading drops others without a word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


@pytest.mark.parametrize("name", ["grpo", "ppo", "ppo_sleeping"])
def test_every_key_of_a_recipe_is_rolls(player, name):
    assert player.must("strict", path=str(RECIPES / f"{name}.yaml"), environment=ENVIRONMENT) == "RLVRConfig"


def test_the_list_above_is_whole():
    runs = {path.stem for path in RECIPES.glob("*.yaml")} - {"base", "judges"}
    assert runs == {"grpo", "ppo", "ppo_sleeping"}


@pytest.fixture
def data(tmp_path) -> Path:
    """A data set that recipes/prepare_data.py made."""
    questions, made = tmp_path / "questions.jsonl", tmp_path / "train.jsonl"
    rows = [{"question": f"What is {number}+1?", "answer": f"So.\n#### {number + 1}"} for number in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = RECIPES.parent / "prepare_data.py"
    command = [sys.executable, str(script), "roll", "--from", str(questions), "--to", str(made), "--name", "sums"]
    subprocess.run([*command, "--instruction", ""], check=True, capture_output=True, timeout=60)
    return made


def test_roll_reads_the_data_set_that_the_script_makes(player, data):
    rows = player.must("data_set", path=str(data), tags={"sums": "judged"}, template="qwen2_5")
    assert [(row["domain"], row["ground_truth"], row["id"]) for row in rows] == [
        ("judged", str(number + 1), str(number)) for number in range(3)
    ]
    assert "What is 0+1?" in rows[0]["text"]


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_dry_run_finds_nothing_missing_but_what_a_cpu_lacks(roll_source, tmp_path, name):
    (tmp_path / "model").mkdir()
    keys = dict.fromkeys(("JUDGE_BASE_URL", "HOSTED_BASE_URL", "HOSTED_MODEL"), "http://127.0.0.1:1/v1")
    done = subprocess.run(
        ["bash", str(RECIPES / "run.sh"), name, "--dry-run", "--offline"],
        env={
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(RECIPES.parents[1]),
            "HOME": str(tmp_path),
            "ROLL_DIR": str(roll_source),
            "PRETRAIN": str(tmp_path / "model"),
            "OUTPUT_DIR": str(tmp_path / "output"),
            "HOSTED_API_KEY": "sk-never-shown",
            **keys,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "sk-never-shown" not in done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"model"}, "a dry run writes nothing"
    failed = {line.partition("  ")[0].strip() for line in done.stdout.splitlines() if " FAIL " in line}
    # The environment of these tests has no GPU, no engine and no tensorboard.
    assert "GPUs" in failed <= {"GPUs", "rollout engine", "logger"}, done.stdout + done.stderr


def test_a_tree_that_is_in_no_list_is_told_with_its_key(roll_source, tmp_path):
    for file in RECIPES.glob("*.yaml"):
        (tmp_path / file.name).write_text(file.read_text().replace("- config: ${oc", "config: ${oc"))
    keys = dict.fromkeys(("JUDGE_BASE_URL", "HOSTED_BASE_URL", "HOSTED_MODEL"), "http://127.0.0.1:1/v1")
    paths = {"PRETRAIN": str(tmp_path), "OUTPUT_DIR": str(tmp_path), "QREWARD_CONFIG": str(tmp_path / "judges.yaml")}
    command = ["--offline", "roll", str(tmp_path), "grpo", str(roll_source)]
    done = subprocess.run(
        [sys.executable, str(RECIPES.parent / "dry_run.py"), *command],
        env={**os.environ, **keys, **paths, "PYTHONPATH": os.pathsep.join((str(RECIPES.parents[1]), str(roll_source)))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = " ".join(done.stdout.split())
    assert "rewards.judged.reward_manager_config: is a mapping, but ROLL's field is a list with one tree" in told, told
    assert "reward_manager_config: [{config: /path/to/judges.yaml}]" in told
