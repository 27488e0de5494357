"""Every flag of the slime recipes is one of slime's: slime passes over what it does not know, without a word."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .real import PROJECT, environment

SCRIPT = PROJECT / "recipes" / "slime" / "run.sh"
TOLD_IN = ("scripts", "docs", "examples", "tests", "README.md")
"""Where slime shows how its flags, Megatron's and SGLang's are used."""


@pytest.fixture(scope="module")
def shown(slime_source) -> set[str]:
    """The flags that slime's own scripts and documents use at this commit."""
    flags: set[str] = set()
    for place in TOLD_IN:
        path = slime_source / place
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.suffix in (".sh", ".md", ".py"):
                flags.update(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", file.read_text(errors="replace")))
    return flags


@pytest.fixture(params=["grpo", "ppo"])
def command(request, slime_source, tmp_path) -> list[str]:
    """What a recipe runs: the arguments of slime's train.py."""
    paths = {
        name: tmp_path / name.lower()
        for name in ("MEGATRON_DIR", "HF_CHECKPOINT", "REF_LOAD", "PROMPT_DATA", "EVAL_DATA")
    }
    for path in paths.values():
        path.touch()
    text = (SCRIPT.parent / "qreward.yaml").read_text()
    keys = {
        name: "http://127.0.0.1:1/v1"
        for name in re.findall(r"oc\.env:(\w+)|api_key_env:\s*\"?(\w+)", text)
        for name in name
        if name
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), request.param],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "QREWARD_DRY_RUN": "1",
            "SLIME_DIR": str(slime_source),
            "SAVE": str(tmp_path / "save"),
            **keys,
            **{name: str(path) for name, path in paths.items()},
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.split("# command\n", 1)[1])
    return words[[Path(word).name for word in words].index("train.py") + 1 :]


def test_every_flag_of_a_recipe_is_one_of_slime(player, shown, command):
    reply = player.ask("unknown_flags", flags=command)
    assert reply.error is None, "slime does not take a value of this recipe; its parser says which in the log"
    assert not [flag for flag in reply.result if flag not in shown]


def test_a_flag_that_slime_does_not_have_would_be_found(player, shown):
    reply = player.ask("unknown_flags", flags=["--rollout-batch-size", "1", "--custom-rm-pth", "slime_adapter.reward"])
    assert reply.result == ["--custom-rm-pth"]
    assert "--custom-rm-pth" not in shown


@pytest.fixture
def data(tmp_path) -> Path:
    """A data set that recipes/prepare_data.py made."""
    questions, made = tmp_path / "questions.jsonl", tmp_path / "train.jsonl"
    rows = [{"question": f"What is {number}+1?", "answer": f"So.\n#### {number + 1}"} for number in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = PROJECT / "recipes" / "prepare_data.py"
    command = [sys.executable, str(script), "slime", "--from", str(questions), "--to", str(made), "--name", "sums"]
    subprocess.run([*command, "--instruction", ""], check=True, capture_output=True, timeout=60)
    return made


def test_slime_reads_the_data_set_that_the_script_makes(player, data):
    samples = player.must("data_set", path=str(data))
    assert [(sample["prompt"], sample["label"]) for sample in samples] == [
        (f"user: What is {number}+1?", f"{number + 1}") for number in range(3)
    ]
    assert samples[0]["metadata"] == {"data_source": "sums", "index": 0, "split": "train", "solution": "So."}


@pytest.mark.parametrize(
    ("recipe", "judges", "flags"),
    [
        ("grpo", SCRIPT.parent / "qreward.yaml", []),
        ("ppo", PROJECT / "recipes" / "judges" / "thinking.yaml", []),
        (
            "grpo",
            PROJECT / "recipes" / "judges" / "colocated.yaml",
            ["--sglang-config", str(SCRIPT.parent / "colocated_judge.yaml")],
        ),
    ],
)
def test_a_dry_run_finds_nothing_but_the_gpus_missing(slime_source, data, tmp_path, recipe, judges, flags):
    for name in ("megatron", "model", "reference"):
        (tmp_path / name).mkdir()
    done = subprocess.run(
        ["bash", str(SCRIPT), recipe, "--dry-run", "--offline", *flags],
        env=environment(
            slime_source,
            PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            SLIME_DIR=str(slime_source),
            MEGATRON_DIR=str(tmp_path / "megatron"),
            HF_CHECKPOINT=str(tmp_path / "model"),
            REF_LOAD=str(tmp_path / "reference"),
            SAVE=str(tmp_path / "save"),
            PROMPT_DATA=str(data),
            EVAL_DATA=str(data),
            QREWARD_CONFIG=str(judges),
            CUDA_VISIBLE_DEVICES="",
            **dict.fromkeys(("JUDGE_BASE_URL", "HOSTED_BASE_URL", "HOSTED_MODEL"), "http://127.0.0.1:1/v1"),
            HOSTED_API_KEY="sk-never-shown",
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line.split()[0] for line in done.stdout.splitlines() if " FAIL " in line]
    assert failed == ["GPUs"], done.stdout + done.stderr
    assert "sk-never-shown" not in done.stdout + done.stderr
    assert not (tmp_path / "save").exists()
