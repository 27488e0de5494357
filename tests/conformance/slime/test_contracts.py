"""slime's own contract tests of plugins, run on ours, and the flags of our recipes, read by slime's parser."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from qreward_plugins.testing import JudgeServer

from ..processes import RECIPES, dry_run
from .trainers import environment

LOADING = "test_plugin_path_loading_contracts.py"
HOOKS = "test_plugin_runtime_hook_contracts.py"
SCRIPT = RECIPES / "slime" / "run.sh"
TOLD_IN = ("scripts", "docs", "examples", "tests", "README.md")
"""Where slime shows how its flags, Megatron's and SGLang's are used."""


# slime's own contract tests of plugins: each must pass, and none be skipped


@pytest.fixture
def contract(slime_source, tmp_path):
    """Run a file of contract tests with these flags; returns how many passed."""

    def run(file: str, *flags: str, **env: str) -> int:
        done = subprocess.run(
            [sys.executable, f"tests/plugin_contracts/{file}", *flags, "-q", "-p", "no:cacheprovider"],
            cwd=slime_source,
            env=environment(slime_source, PYTHONDONTWRITEBYTECODE="1", **env),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        summary = done.stdout.strip().splitlines()[-1]
        assert not re.search("skipped|failed|error|xfailed|deselected", summary), summary
        return int(re.search(r"(\d+) passed", summary)[1])

    # The samples of the contract tests are none of ours.
    with JudgeServer(lambda call: 0.5) as server:
        path, source = tmp_path / "qreward.yaml", {"kind": "http", "url": server.score_url}
        path.write_text(json.dumps({"sources": {"scores": source}, "judges": {"scores": {"kind": "function"}}}))
        yield lambda file, *flags: run(file, *flags, QREWARD_CONFIG=str(path))


@pytest.mark.parametrize(
    "flags",
    [
        ["--custom-rm-path", "slime_adapter.reward"],
        ["--dynamic-sampling-filter-path", "slime_adapter.drop_failed_groups"],
        ["--dynamic-sampling-filter-path", "slime_adapter.drop_failed_and_flat_groups"],
    ],
    ids=" ".join,
)
def test_what_slime_loads_by_path(contract, flags):
    assert contract(LOADING, *flags) == 16


def test_what_slime_calls_at_run_time(contract):
    passed = contract(
        HOOKS,
        *("--custom-reward-post-process-path", "slime_adapter.post_process"),
        *("--custom-rollout-log-function-path", "slime_adapter.log_rollout"),
        *("--custom-eval-rollout-log-function-path", "slime_adapter.log_eval"),
    )
    assert passed == 10


@pytest.mark.parametrize(
    ("ours", "slimes"),
    [
        ("slime_adapter.eval_rollout", "slime.rollout.sglang_rollout.generate_rollout"),
        ("slime_adapter.DataSource", "slime.rollout.data_source.RolloutDataSourceWithBuffer"),
    ],
)
def test_what_slimes_contract_tests_would_call_without_a_run_has_the_parameters_of_slimes_own(player, ours, slimes):
    assert player.must("parameters", path=ours) == player.must("parameters", path=slimes)


# Every flag of a recipe is one of slime's, which passes over what it does not know, without a word


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


def _prepared(folder: Path) -> Path:
    """A data set of three questions that recipes/prepare_data.py made."""
    questions, made = folder / "questions.jsonl", folder / "train.jsonl"
    rows = [{"question": f"What is {number}+1?", "answer": f"So.\n#### {number + 1}"} for number in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(RECIPES / "prepare_data.py"), "slime"]
    command += ["--from", str(questions), "--to", str(made), "--name", "sums", "--instruction", ""]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return made


def test_a_dry_run_finds_nothing_but_the_gpus_missing(slime_source, tmp_path):
    paths = {"MEGATRON_DIR": "megatron", "HF_CHECKPOINT": "model", "REF_LOAD": "reference"}
    for name in paths.values():
        (tmp_path / name).mkdir()
    data = str(_prepared(tmp_path))
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
