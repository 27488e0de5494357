"""The slime recipes: what their script would run, what it refuses, and that no key shows up anywhere on the way.

The script runs for real, up to the commands it starts: `ray` and `qreward` are stand-ins that write down how they were
called, in a folder that looks like slime's image to the script.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from .launching import JUDGES, judges_of
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


@pytest.mark.parametrize(("recipe", "estimator"), [("grpo", "grpo"), ("ppo", "ppo")])
def test_the_sizes_of_a_recipe_agree(slime, recipe, estimator):
    _, command, _ = dry_run(slime, recipe)
    flags = flags_of(command)
    prompts, samples = int(flags["--rollout-batch-size"]), int(flags["--n-samples-per-prompt"])
    groups = load_tree().groups
    assert flags["--advantage-estimator"] == estimator
    assert int(flags["--global-batch-size"]) == prompts * samples
    # slime refuses flags that both keep the policy near its reference.
    assert float(flags.get("--kl-coef", 0)) == 0 or float(flags["--kl-loss-coef"]) == 0
    if recipe == "grpo":
        assert int(flags["--over-sampling-batch-size"]) > prompts
        assert 1 < groups.min_scored <= samples
        assert groups.give_up_after >= prompts


def test_everything_that_is_missing_is_told_at_once(slime):
    variables = {"SLIME_DIR": "/nowhere/slime", "EVAL_DATA": "/nowhere/e.jsonl", "HOSTED_MODEL": None}
    assert slime.missing("grpo", **variables) == ["SLIME_DIR", "SLIME_DIR", "EVAL_DATA", "HOSTED_MODEL"]
    assert slime.calls() == []
    assert slime.run("grpo", PROMPT_DATA=str(slime.root / "train.jsonl@[0:64]"), QREWARD_DRY_RUN="1").returncode == 0


def test_a_configuration_without_the_one_key_is_named_in_the_environment_of_the_job(slime):
    judges = slime.root / "judges.yaml"
    judges.write_text(yaml.safe_dump(yaml.safe_load((RECIPES / "qreward.yaml").read_text())["qreward"]))
    environment, command, _ = dry_run(slime, "grpo", QREWARD_CONFIG="judges.yaml")
    assert environment["QREWARD_CONFIG"] == str(judges)
    assert "--custom-config-path" not in flags_of(command)
    environment, _, _ = dry_run(slime, "grpo")
    assert "QREWARD_CONFIG" not in environment, "slime hands the tree on; named as well, it would be read twice"


def test_the_job_gets_the_variables_that_the_configuration_reads(slime):
    judges = slime.root / "own.yaml"
    judges.write_text(
        "qreward:\n"
        "  # ${oc.env:IN_A_COMMENT}\n"
        "  a: {url: '${oc.env:URL}', model: '${oc.env:MODEL,small}', key: ${oc.env:OPTIONAL, none}}\n"
        '  b: {api_key_env: "KEY_OF_B", price: 1}\n'
    )
    variables = {"URL": "u", "KEY_OF_B": "k", "MORE": "m", "QREWARD_ENV": "MORE"}
    environment, command, _ = dry_run(slime, "grpo", QREWARD_CONFIG="own.yaml", PYTHONPATH="/mine", **variables)
    assert {name for name, value in environment.items() if value == "***"} == {"URL", "KEY_OF_B", "MORE"}
    assert environment["PYTHONPATH"] == f"{slime.root}/megatron:{slime.root}/slime:/mine"
    # Ray runs the job elsewhere, so a relative path would lead nowhere.
    assert flags_of(command)["--custom-config-path"] == str(judges)

    environment, _, _ = dry_run(slime, "grpo", QREWARD_CONFIG="own.yaml", MODEL="big", **variables)
    assert environment["MODEL"] == "***"
    done = slime.run("grpo", QREWARD_CONFIG="own.yaml", QREWARD_DRY_RUN="1", QREWARD_ENV="MORE")
    told = [line.strip() for line in done.stderr.splitlines()[1:]]
    assert sorted(told) == ["KEY_OF_B: not set", "MORE: not set", "URL: not set"]


def test_a_judge_that_slime_serves_is_not_asked_before(slime):
    judges = slime.root / "served.yaml"
    judges.write_text("qreward:\n  sources: {own: {base_url: framework://reward/v1}}\n")
    assert slime.run("grpo", QREWARD_CONFIG="served.yaml").returncode == 0
    assert [name for name, *_ in slime.calls()] == ["ray", "ray"]
    judges.write_text("qreward: {sources: {own: {base_url: http://judge/v1}}}  # not framework://reward\n")
    assert slime.run("grpo", QREWARD_CONFIG="served.yaml").returncode == 0
    assert slime.calls()[2][0] == "qreward"


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

    _, printed, _ = dry_run(SimpleNamespace(run=slime.run, calls=list), "grpo")
    assert printed == ["ray", *arguments]


def test_the_critic_has_checkpoints_of_its_own_and_goes_on_from_them(slime):
    roles = slime.root / "save" / "roles.yaml"
    _, command, printed = dry_run(slime, "ppo", SAVE="save")
    assert flags_of(command)["--megatron-config-path"] == str(roles)
    assert not roles.exists()

    assert slime.run("ppo", SAVE="save").returncode == 0
    (entry,) = yaml.safe_load(roles.read_text())["megatron"]
    assert roles.read_text().strip() in printed
    assert entry["role"] == "critic"
    critic = str(slime.root / "save" / "critic")
    # It begins with what the actor begins with: a path without a checkpoint would be an error of slime's.
    assert entry["overrides"] == {"lr": 1e-5, "save": critic}
    assert flags_of(command)["--save"] != critic

    Path(critic).mkdir()
    (Path(critic) / "latest_checkpointed_iteration.txt").touch()
    assert slime.run("ppo", SAVE="save").returncode == 0
    (entry,) = yaml.safe_load(roles.read_text())["megatron"]
    assert entry["overrides"] == {"lr": 1e-5, "save": critic, "load": critic}


def load_tree():
    """The configuration as the adapter gets it: slime reads the file, and hands on what is below its one key."""
    read = yaml.safe_load((RECIPES / "qreward.yaml").read_text())
    assert list(read) == ["qreward"]
    return judges_of(read["qreward"])


def test_a_ray_that_runs_is_used(slime):
    done = slime.run("ppo", RAY_API_SERVER_ADDRESS="http://head.example:8265")
    assert done.returncode == 0, done.stderr
    assert [(name, arguments[0]) for name, arguments, _ in slime.calls()] == [("qreward", "check"), ("ray", "job")]
    assert slime.calls()[-1][1][:4] == ["job", "submit", "--address", "http://head.example:8265"]


@pytest.mark.parametrize(("failing", "last"), [("qreward", "check"), ("ray", "start")])
def test_a_failure_on_the_way_ends_the_run(slime, failing, last):
    done = slime.run("grpo", FAILING=failing)
    assert done.returncode == 1
    assert slime.calls()[-1][1][0] == last
