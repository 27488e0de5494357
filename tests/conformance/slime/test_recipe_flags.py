"""Every flag of the slime recipes is one of slime's: slime passes over what it does not know, without a word."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ..recipes import RECIPES, dry_run, prepared
from .real import environment

SCRIPT = RECIPES / "slime" / "run.sh"
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
    paths = ("MEGATRON_DIR", "HF_CHECKPOINT", "REF_LOAD", "PROMPT_DATA", "EVAL_DATA")
    (tmp_path / "there").touch()
    text = (SCRIPT.parent / "qreward.yaml").read_text()
    keys = {name for found in re.findall(r"oc\.env:(\w+)|api_key_env:\s*\"?(\w+)", text) for name in found if name}
    settings = {"HOME": tmp_path, "QREWARD_DRY_RUN": 1, "SLIME_DIR": slime_source, "SAVE": tmp_path / "save"}
    settings |= {**dict.fromkeys(keys, "http://127.0.0.1:1/v1"), **dict.fromkeys(paths, tmp_path / "there")}
    done = subprocess.run(
        ["bash", str(SCRIPT), request.param],
        env={"PATH": os.environ["PATH"], **{name: str(value) for name, value in settings.items()}},
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


def test_a_dry_run_finds_nothing_but_the_gpus_missing(slime_source, tmp_path):
    paths = {"MEGATRON_DIR": "megatron", "HF_CHECKPOINT": "model", "REF_LOAD": "reference"}
    for name in paths.values():
        (tmp_path / name).mkdir()
    data = str(prepared("slime", tmp_path))
    settings = environment(
        slime_source,
        **{variable: str(tmp_path / name) for variable, name in paths.items()},
        SLIME_DIR=str(slime_source),
        SAVE=str(tmp_path / "save"),
        PROMPT_DATA=data,
        EVAL_DATA=data,
        QREWARD_CONFIG=str(RECIPES / "judges" / "colocated.yaml"),
        CUDA_VISIBLE_DEVICES="",
    )
    served = ("--sglang-config", str(SCRIPT.parent / "colocated_judge.yaml"))
    assert dry_run("slime", "grpo", tmp_path, settings, *served) == {"GPUs"}
    assert not (tmp_path / "save").exists()
