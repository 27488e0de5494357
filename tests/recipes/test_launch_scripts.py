"""The run.sh of the recipes: what it would run, what it refuses, and that no key shows up anywhere on the way; and what
ROLL's recipes compose to.

The scripts run for real, up to what they start: `ray`, `qreward` and ROLL's start script are stand-ins that write down
how they were called, in a folder that looks like slime's image, or beside a checkout whose start script composes the
configuration as ROLL's own does and prints it. Whether ROLL's dataclasses have all the keys is tested where ROLL is
(tests/conformance/roll).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from .conftest import BASH, JUDGES, KEY, RECIPES, ROLL_DATA, Launch, judges_of

AWKWARD = 'with \'quotes" \\ $HOME `id` {"json": 1}'
RUNS = {"RAY_API_SERVER_ADDRESS": "http://head.example:8265"}


@pytest.fixture
def verl(tmp_path):
    return Launch(tmp_path, RECIPES / "verl" / "run.sh", programs=("ray", "qreward", "python3"))


@pytest.mark.parametrize(
    ("framework", "wrong"),
    [("verl", [[], ["judges"]]), ("slime", [[], ["dpo"]]), ("roll", [["base"], ["grpo", "x=1"]])],
)
def test_a_script_is_sound_shell_and_says_how_it_is_used(framework, wrong):
    script = RECIPES / framework / "run.sh"
    subprocess.run([BASH, "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    for arguments in wrong:
        done = subprocess.run([BASH, str(script), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(f"usage: recipes/{framework}/run.sh"), "without the shell's own line"


@pytest.mark.parametrize("file", ["slime/qreward.yaml", "roll/judges.yaml"])
def test_the_judges_of_a_recipe_are_valid_and_hold_no_key(file):
    text = (RECIPES / file).read_text()
    tree = yaml.safe_load(text)
    # slime hands on what is below its one key.
    config = judges_of(tree.get("qreward", tree), QREWARD_RULES=str(RECIPES / "roll" / "rules.py"))
    assert (config.sources["hosted"].api_key_env, config.on_failure) == ("HOSTED_API_KEY", "exclude")
    assert KEY not in repr(config)
    assert "api_key:" not in text


@pytest.mark.parametrize("framework", ["slime", "roll"])
def test_what_a_recipe_names_of_its_adapter_is_there(framework):
    texts = [path.read_text() for path in (RECIPES / framework).glob("*.*")]
    names = {name for text in texts for name in re.findall(rf"\b{framework}_adapter\.(\w+)", text)}
    assert names
    assert names <= {*importlib.import_module(f"{framework}_adapter").__all__}


def test_verl_is_started_after_its_judges_were_checked(verl):
    done = verl.run("grpo", "trainer.nnodes=2")
    assert done.returncode == 0, done.stderr
    check, train = verl.calls()
    assert check[:2] == ["qreward", ["check", str(RECIPES / "verl" / "judges.yaml")]]
    assert train[1][:2] == ["-m", "verl.trainer.main_ppo"]
    assert train[1][2:] == ["--config-dir", str(RECIPES / "verl"), "--config-name", "grpo", "trainer.nnodes=2"]
    verl.run("grpo_sleeping")
    assert verl.calls()[2][1] == ["check", str(RECIPES / "judges" / "sleeping.yaml")]
    # Its judge runs in the training only.
    verl.run("grpo_colocated")
    assert [name for name, *_ in verl.calls()[4:]] == ["python3"]


def test_a_ray_that_runs_gets_the_variables_by_verls_job(verl):
    verl.run("grpo", QREWARD_ENV="MORE", MORE="m", HOSTED_API_KEY=AWKWARD, **RUNS)
    name, arguments, stdin = verl.calls()[-1]
    assert [name, *arguments[:5]] == ["ray", "job", "submit", "--address", *RUNS.values(), "--runtime-env"]
    variables = json.loads(stdin)["env_vars"]
    assert (variables["HOSTED_API_KEY"], variables["MORE"]) == (AWKWARD, "m")
    assert variables["QREWARD_CONFIG"] == str(RECIPES / "verl" / "judges.yaml")
    assert variables["QREWARD_JOURNAL"] == str(verl.root / "qreward-grpo.sqlite")


@pytest.mark.parametrize("framework", ["slime", "roll"])
def test_no_key_is_shown(request, framework):
    launch = request.getfixturevalue(framework)
    runs = ((KEY, {"QREWARD_DRY_RUN": "1"}), (KEY, {"HOSTED_MODEL": None}), (AWKWARD, RUNS))
    for key, variables in runs:
        done = launch.run("ppo", trace=key == KEY, HOSTED_API_KEY=key, **variables)
        assert key not in done.stdout + done.stderr
        assert json.dumps(key)[1:-1] not in done.stdout + done.stderr
        for name, arguments, stdin in launch.calls():
            assert key not in " ".join(arguments)
            if name == "ray" and stdin:
                given = json.loads(stdin)["env_vars"]
                assert given.keys() >= JUDGES.keys()
                assert yaml.safe_load(stdin)["env_vars"] == given, "Ray reads it as YAML"
                assert given["HOSTED_API_KEY"] in (KEY, AWKWARD)


# slime


SLIME = RECIPES / "slime"
HOOKS = {
    "--custom-rm-path": "slime_adapter.reward",
    "--data-source-path": "slime_adapter.DataSource",
    "--custom-reward-post-process-path": "slime_adapter.post_process",
    "--custom-rollout-log-function-path": "slime_adapter.log_rollout",
    "--custom-eval-rollout-log-function-path": "slime_adapter.log_eval",
}
FILTER = {"--dynamic-sampling-filter-path": "slime_adapter.drop_failed_groups"}


def dry_run_of_slime(slime, *arguments, **variables):
    """The job's environment and its command, as the script prints them behind everything else."""
    *_, runtime_env, _, command = slime.dry_run(*arguments, **variables)
    return json.loads(runtime_env)["env_vars"], shlex.split(command)


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
    _, command = dry_run_of_slime(slime, recipe)
    flags = flags_of(command)
    assert {name: value for name, value in flags.items() if "slime_adapter" in value} == hooks
    assert flags["--custom-config-path"] == str(SLIME / "qreward.yaml")
    assert flags["--normalization"] == "RMSNorm"
    assert command[: command.index("--")][:3] == ["ray", "job", "submit"]
    assert command[command.index("--") :][:3] == ["--", "python3", str(slime.root / "slime" / "train.py")]


def test_everything_that_slime_misses_is_told_at_once(slime):
    variables = {"SLIME_DIR": "/nowhere/slime", "EVAL_DATA": "/nowhere/e.jsonl", "HOSTED_MODEL": None}
    assert slime.missing("grpo", **variables) == ["SLIME_DIR", "SLIME_DIR", "EVAL_DATA", "HOSTED_MODEL"]
    assert slime.calls() == []
    slime.dry_run("grpo", PROMPT_DATA=str(slime.root / "train.jsonl@[0:64]"))


def test_the_job_gets_the_variables_that_the_configuration_reads(slime):
    judges = slime.root / "own.yaml"
    judges.write_text(
        "qreward:\n"
        "  # ${oc.env:IN_A_COMMENT}\n"
        "  a: {url: '${oc.env:URL}', model: '${oc.env:MODEL,small}'}\n"
        '  b: {api_key_env: "KEY_OF_B", price: 1}\n'
    )
    variables = {"URL": "u", "KEY_OF_B": "k", "MORE": "m", "QREWARD_ENV": "MORE"}
    environment, command = dry_run_of_slime(slime, "grpo", QREWARD_CONFIG="own.yaml", **variables)
    assert {name for name, value in environment.items() if value == "***"} == {"URL", "KEY_OF_B", "MORE"}
    # Ray runs the job elsewhere, so a relative path would lead nowhere.
    assert flags_of(command)["--custom-config-path"] == str(judges)
    assert {*slime.missing("grpo", QREWARD_CONFIG="own.yaml", QREWARD_ENV="MORE")} == {"URL", "KEY_OF_B", "MORE"}


def test_a_run_checks_the_judges_starts_ray_and_submits(slime):
    done = slime.run("grpo", QREWARD_CONFIG=str(SLIME / "qreward.yaml"))
    assert done.returncode == 0, done.stderr
    (check, start, submit) = slime.calls()
    assert check[:2] == ["qreward", ["check", str(SLIME / "qreward.yaml")]]
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


# ROLL


ROLL = RECIPES / "roll"


@pytest.fixture
def recipe(monkeypatch):
    """`recipe(name)`: the recipe as ROLL composes and resolves it."""
    monkeypatch.setenv("QREWARD_CONFIG", "/judges.yaml")
    for name in ("PRETRAIN", "OUTPUT_DIR"):
        monkeypatch.delenv(name, raising=False)

    def read(name):
        with initialize_config_dir(str(ROLL), version_base="1.3"):
            return OmegaConf.to_container(compose(name), resolve=True, throw_on_missing=True)

    return read


def gpus(role):
    numbers = re.fullmatch(r"list\(range\((\d+),(\d+)\)\)", role["device_mapping"])
    return set(range(int(numbers[1]), int(numbers[2])))


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_every_domain_has_data_and_a_worker_of_its_own(recipe, name):
    told = recipe(name)
    names = {told["user_defined_rollout_loop_cls"], told["rewards"]["judged"]["worker_cls"]}
    assert names == {"roll_adapter.QRewardRolloutLoop", "roll_adapter.QRewardWorker"}
    assert told["rewards"]["judged"]["reward_manager_config"] == [{"config": "/judges.yaml"}]
    assert told["generate_opt_level"] == 1, "the only path that calls a rollout loop"
    shares = told["actor_train"]["data_args"]["domain_interleave_probs"]
    assert set(shares) == set(told["rewards"])
    assert sum(shares.values()) == 1
    tags = [tag for domain in told["rewards"].values() for tag in domain["tag_included"]]
    assert len(tags) == len(set(tags))


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_sizes_of_a_recipe_agree(recipe, name):
    told, judges = recipe(name), judges_of(ROLL / "judges.yaml", QREWARD_RULES=str(ROLL / "rules.py"))
    train, infer = told["actor_train"], told["actor_infer"]
    assert gpus(train) | gpus(infer) | gpus(told["reference"]) <= set(range(8))
    if name == "ppo":
        assert told["adv_estimator"] == "gae"
        assert gpus(told["critic"]).isdisjoint(gpus(train))
    else:
        assert told["adv_estimator"] == "grpo"
        # ROLL generates while it trains, so on other GPUs.
        assert told["async_generation_ratio"] >= 1
        assert gpus(infer).isdisjoint(gpus(train))
        assert 1 < judges.groups.min_scored <= told["num_return_sequences_in_group"]
    sizes = train["training_args"]
    ranks = len(gpus(train)) // train["strategy_args"]["strategy_config"]["tensor_model_parallel_size"]
    update = ranks * sizes["per_device_train_batch_size"] * sizes["gradient_accumulation_steps"]
    assert told["rollout_batch_size"] * told["num_return_sequences_in_group"] % update == 0
    # ROLL's default, below which the adapter wants the deadline.
    assert judges.engine.deadline_s <= 0.8 * told.get("rpc_timeout", 3600)


def test_a_dry_run_says_what_would_be_run_and_masks_what_the_judges_read(roll):
    recipe, _, rest = "\n".join(roll.dry_run("grpo")).partition("\n# environment\n")
    environment, _, command = rest.strip().splitlines()
    printed, environment, command = yaml.safe_load(recipe), json.loads(environment)["env_vars"], shlex.split(command)
    assert printed["adv_estimator"] == "grpo"
    assert printed["rewards"]["judged"]["reward_manager_config"] == [{"config": "${oc.env:QREWARD_CONFIG}"}]
    assert {name for name, value in environment.items() if value == "***"} == set(JUDGES)
    assert environment["QREWARD_CONFIG"] == str(roll.script.parent / "judges.yaml")
    assert environment["PYTHONPATH"] == str(roll.root / "roll")
    folder = os.path.relpath(os.path.realpath(roll.script.parent), os.path.realpath(roll.root / "roll" / "examples"))
    start = str(roll.root / "roll" / "examples" / "start_rlvr_pipeline.py")
    assert command[:3] == ["env", "-C", str(roll.root / "roll")]
    assert command[3:] == ["python3", start, "--config_path", folder, "--config_name", "grpo"]


def test_a_run_checks_the_judges_and_starts_roll_with_the_keys_in_its_environment(roll):
    done = roll.run("ppo")
    assert done.returncode == 0, done.stderr
    config = str(roll.script.parent / "judges.yaml")
    assert roll.calls() == [["qreward", ["check", config], ""], ["start", [str(roll.root / "roll"), "ppo"], KEY]]
    printed = yaml.safe_load(done.stdout)
    assert printed["adv_estimator"] == "gae"
    assert printed["rewards"]["judged"]["reward_manager_config"] == [{"config": config}]
    assert not [value for value in JUDGES.values() if value in done.stdout]


def test_everything_that_roll_misses_is_told_at_once(roll):
    data = roll.root / "roll" / "data" / f"{ROLL_DATA[0]}.jsonl"
    data.unlink()
    variables = {"PRETRAIN": "/nowhere", "HOSTED_MODEL": None, "QREWARD_ENV": "WANDB_API_KEY"}
    assert roll.missing("grpo", **variables) == ["grpo.yaml", "grpo.yaml", "HOSTED_MODEL", "WANDB_API_KEY"]
    data.touch()
    assert roll.missing("grpo", ROLL_DIR="/nowhere", QREWARD_CONFIG="no.yaml")[0] == "ROLL_DIR"
    assert roll.calls() == []
