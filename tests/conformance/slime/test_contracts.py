"""slime's own contract tests of plugins, run on ours, and the flags of our recipes, read by slime's parser."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from qreward_plugins.testing import JudgeServer

from ..processes import RECIPES, dry_run
from .trainers import environment

LOADING = "test_plugin_path_loading_contracts.py"
HOOKS = "test_plugin_runtime_hook_contracts.py"


# slime's own contract tests of plugins: each must pass, and none be skipped


@pytest.fixture
def contract(slime_source, tmp_path):
    """Run a file of contract tests with these flags; returns how many passed."""

    def run(file: str, *flags: str) -> int:
        done = subprocess.run(
            [sys.executable, f"tests/plugin_contracts/{file}", *flags, "-q", "-p", "no:cacheprovider"],
            cwd=slime_source,
            env=environment(slime_source, PYTHONDONTWRITEBYTECODE="1", QREWARD_CONFIG=str(path)),
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
        yield run


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


# The recipes: slime passes over a flag that it does not know, without a word


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_dry_run_knows_every_flag_and_finds_nothing_but_the_gpus_missing(slime_source, tmp_path, recipe):
    paths = {"MEGATRON_DIR": "megatron", "HF_CHECKPOINT": "model", "REF_LOAD": "reference"}
    for name in paths.values():
        (tmp_path / name).mkdir()
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "What is 1+1?", "label": "2"}) + "\n")
    settings = environment(
        slime_source,
        **{variable: str(tmp_path / name) for variable, name in paths.items()},
        SLIME_DIR=str(slime_source),
        SAVE=str(tmp_path / "save"),
        PROMPT_DATA=str(tmp_path / "sums.jsonl"),
        EVAL_DATA=str(tmp_path / "sums.jsonl"),
        CUDA_VISIBLE_DEVICES="",
    )
    served: tuple[str, ...] = ()
    if recipe == "grpo":
        settings["QREWARD_CONFIG"] = str(RECIPES / "judges" / "colocated.yaml")
        served = ("--sglang-config", str(RECIPES / "slime" / "colocated_judge.yaml"))
    assert dry_run("slime", recipe, tmp_path, settings, *served) == {"GPUs"}
    assert not (tmp_path / "save").exists()
