"""The slime recipes: what their script would run, what it refuses, and that no key shows up anywhere on the way.

The script runs for real, up to the commands it starts: `ray` and `qreward` are stand-ins that write down how they were
called, in a folder that looks like slime's image to the script.
"""

from __future__ import annotations

import json
import shlex

import pytest

from .launching import JUDGES
from .launching import RECIPES as ALL

RECIPES = ALL / "slime"
HOOKS = {
    "--custom-rm-path": "slime_adapter.reward",
    "--data-source-path": "slime_adapter.DataSource",
    "--custom-reward-post-process-path": "slime_adapter.post_process",
    "--custom-rollout-log-function-path": "slime_adapter.log_rollout",
    "--custom-eval-rollout-log-function-path": "slime_adapter.log_eval",
}
FILTER = {"--dynamic-sampling-filter-path": "slime_adapter.drop_failed_groups"}


def dry_run(slime, *arguments, **variables):
    """The job's environment, its command, and everything before them, as the script prints them."""
    done = slime.run(*arguments, QREWARD_DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    assert slime.calls() == []
    *before, runtime_env, _, command = done.stdout.splitlines()
    return json.loads(runtime_env)["env_vars"], shlex.split(command), "\n".join(before)


def flags_of(command):
    """Every flag of `train.py` with its values, the last one winning as in argparse."""
    flags = {}
    for word in command[command.index("--") + 3 :]:
        if word.startswith("--"):
            name = word
            flags[name] = []
        else:
            flags[name].append(word)
    return {name: " ".join(values) for name, values in flags.items()}


@pytest.mark.parametrize(("recipe", "hooks"), [("grpo", {**HOOKS, **FILTER}), ("ppo", HOOKS)])
def test_a_recipe_sets_exactly_these_hooks(slime, recipe, hooks):
    _, command, _ = dry_run(slime, recipe)
    flags = flags_of(command)
    assert {name: value for name, value in flags.items() if "slime_adapter" in value} == hooks
    assert flags["--custom-config-path"] == str(RECIPES / "qreward.yaml")
    assert flags["--normalization"] == "RMSNorm"
    assert command[: command.index("--")][:3] == ["ray", "job", "submit"]
    assert command[command.index("--") :][:3] == ["--", "python3", str(slime.root / "slime" / "train.py")]


def test_everything_that_is_missing_is_told_at_once(slime):
    variables = {"SLIME_DIR": "/nowhere/slime", "EVAL_DATA": "/nowhere/e.jsonl", "HOSTED_MODEL": None}
    assert slime.missing("grpo", **variables) == ["SLIME_DIR", "SLIME_DIR", "EVAL_DATA", "HOSTED_MODEL"]
    assert slime.calls() == []
    assert slime.run("grpo", PROMPT_DATA=str(slime.root / "train.jsonl@[0:64]"), QREWARD_DRY_RUN="1").returncode == 0


def test_the_job_gets_the_variables_that_the_configuration_reads(slime):
    judges = slime.root / "own.yaml"
    judges.write_text(
        "qreward:\n"
        "  # ${oc.env:IN_A_COMMENT}\n"
        "  a: {url: '${oc.env:URL}', model: '${oc.env:MODEL,small}'}\n"
        '  b: {api_key_env: "KEY_OF_B", price: 1}\n'
    )
    variables = {"URL": "u", "KEY_OF_B": "k", "MORE": "m", "QREWARD_ENV": "MORE"}
    environment, command, _ = dry_run(slime, "grpo", QREWARD_CONFIG="own.yaml", **variables)
    assert {name for name, value in environment.items() if value == "***"} == {"URL", "KEY_OF_B", "MORE"}
    # Ray runs the job elsewhere, so a relative path would lead nowhere.
    assert flags_of(command)["--custom-config-path"] == str(judges)
    done = slime.run("grpo", QREWARD_CONFIG="own.yaml", QREWARD_DRY_RUN="1", QREWARD_ENV="MORE")
    told = [line.strip() for line in done.stderr.splitlines()[1:]]
    assert sorted(told) == ["KEY_OF_B: not set", "MORE: not set", "URL: not set"]


def test_a_run_checks_the_judges_starts_ray_and_submits(slime):
    done = slime.run("grpo", QREWARD_CONFIG=str(RECIPES / "qreward.yaml"))
    assert done.returncode == 0, done.stderr
    (check, start, submit) = slime.calls()
    assert check[:2] == ["qreward", ["check", str(RECIPES / "qreward.yaml")]]
    assert start[0] == "ray"
    assert start[1][:2] == ["start", "--head"]
    assert "--dashboard-host" not in " ".join(start[1])
    _, arguments, stdin = submit
    assert arguments[:2] == ["job", "submit"]
    assert arguments[arguments.index("--runtime-env") + 1] == "/dev/stdin"
    assert json.loads(stdin)["env_vars"].items() >= JUDGES.items()


@pytest.mark.parametrize(("failing", "last"), [("qreward", "check"), ("ray", "start")])
def test_a_failure_on_the_way_ends_the_run(slime, failing, last):
    assert slime.run("grpo", FAILING=failing).returncode == 1
    assert slime.calls()[-1][1][0] == last
