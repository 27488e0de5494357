"""The ROLL recipes: what they compose to, what their script runs and refuses, and that no key shows up on the way.

The script runs for real, up to what it starts: `ray`, `qreward` and ROLL's start script are stand-ins. That of the
start script composes the configuration as ROLL's own does, prints it as ROLL does, and writes down what it was given.
Whether ROLL's dataclasses have all the keys is tested where ROLL is (tests/conformance/roll).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import roll_adapter
from qreward_plugins import RewardEngine, Sample, load_config
from qreward_plugins.testing import JudgeServer

RECIPES = Path(__file__).parents[2] / "recipes" / "roll"
BASH = shutil.which("bash") or "bash"
KEY = "sk-never-shown-4711"
JUDGES = {
    "JUDGE_BASE_URL": "http://judge.example:8000/v1",
    "HOSTED_BASE_URL": "https://hosted.example/v1",
    "HOSTED_MODEL": "judge-large",
    "HOSTED_API_KEY": KEY,
}
DATA = ("llm_judge_Multi-subject-RLVR_deal_new", "math_deepmath_deal", "gpqa_diamond_boxed")
PROGRAM = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
stdin = sys.stdin.read() if "submit" in sys.argv else ""
with open({log!r}, "a") as log:
    log.write(json.dumps([name, sys.argv[1:], stdin]) + "\\n")
if sys.argv[1:] == ["status"]:
    sys.exit(not os.environ.get("RAY_RUNS"))
sys.exit(name in os.environ.get("FAILING", "").split())
"""
START = """
import argparse, json, os, sys
from hydra import compose, initialize
from omegaconf import OmegaConf
parser = argparse.ArgumentParser()
parser.add_argument("--config_path")
parser.add_argument("--config_name")
asked = parser.parse_args()
initialize(config_path=asked.config_path, version_base="1.1")
print(OmegaConf.to_yaml(compose(asked.config_name), resolve=True))
with open({log!r}, "a") as log:
    log.write(json.dumps(["start", [os.getcwd(), asked.config_name], os.environ.get("HOSTED_API_KEY")]) + "\\n")
"""


@pytest.fixture
def image(tmp_path):
    """`run(*arguments, **variables)` runs the script in a complete setting; None takes a variable away."""
    roll, log = tmp_path / "roll", tmp_path / "log"
    for folder in (roll / "examples", roll / "data", tmp_path / "bin"):
        folder.mkdir(parents=True)
    (roll / "examples" / "start_rlvr_pipeline.py").write_text(START.format(log=str(log)))
    for name in DATA:
        (roll / "data" / f"{name}.jsonl").touch()
    # A copy, so that a test can put a recipe of its own beside the others.
    recipes = tmp_path / "recipes" / "roll"
    shutil.copytree(RECIPES, recipes, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(RECIPES.parent / "common.sh", recipes.parent)
    for name in ("ray", "qreward"):
        program = tmp_path / "bin" / name
        program.write_text(PROGRAM.format(python=sys.executable, log=str(log)))
        program.chmod(0o755)
    environment = {
        "PATH": os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(tmp_path),
        "ROLL_DIR": str(roll),
        **JUDGES,
    }

    def run(*arguments, trace=False, **variables):
        wanted = {**environment, **variables}
        command = [BASH, *(["-x"] if trace else []), str(recipes / "run.sh"), *arguments]
        return subprocess.run(
            command,
            env={name: value for name, value in wanted.items() if value is not None},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls():
        told = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [call for call in told if call[:2] != ["ray", ["status"]]]

    return SimpleNamespace(run=run, calls=calls, root=tmp_path, roll=roll, recipes=recipes)


def dry_run(image, *arguments, **variables):
    """The recipe, the environment and the command, as the script prints them."""
    done = image.run(*arguments, QREWARD_DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    assert image.calls() == []
    recipe, _, rest = done.stdout.partition("\n# environment\n")
    environment, _, command = rest.strip().splitlines()
    return yaml.safe_load(recipe), json.loads(environment)["env_vars"], shlex.split(command)


def told_as_missing(done):
    assert done.returncode == 2
    assert done.stdout == ""
    first, *rest = done.stderr.splitlines()
    assert first == "recipes/roll/run.sh: cannot start:"
    return [line.strip().split(":")[0] for line in rest]


@pytest.fixture
def recipe(monkeypatch):
    """`recipe(name)`: the recipe as ROLL composes and resolves it."""
    monkeypatch.setenv("QREWARD_CONFIG", "/judges.yaml")
    for name in ("PRETRAIN", "OUTPUT_DIR"):
        monkeypatch.delenv(name, raising=False)

    def read(name):
        with initialize_config_dir(str(RECIPES), version_base="1.3"):
            return OmegaConf.to_container(compose(name), resolve=True, throw_on_missing=True)

    return read


def gpus(role):
    numbers = re.fullmatch(r"list\(range\((\d+),(\d+)\)\)", role["device_mapping"])
    return set(range(int(numbers[1]), int(numbers[2])))


def test_the_script_is_sound_shell_and_says_how_it_is_used():
    script = RECIPES / "run.sh"
    subprocess.run([BASH, "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    for arguments in ([], ["dpo"], ["base"], ["judges"], ["grpo", "max_steps=1"]):
        done = subprocess.run([BASH, str(script), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "usage:" in done.stderr


@pytest.mark.parametrize("arguments", [["--dry-run", "grpo"], ["grpo", "--offline", "--dry-run"]])
def test_a_dry_run_is_one_wherever_it_is_asked_for(image, arguments):
    stand_in = image.recipes.parent / "dry_run.py"
    stand_in.write_text("import sys; print('dry run of', *sys.argv[1:])")
    done = image.run(*arguments)
    assert done.returncode == 0, done.stderr
    offline = ["--offline"] if "--offline" in arguments else []
    expected = ["dry run of", *offline, "roll", str(image.recipes), "grpo", str(image.roll)]
    assert done.stdout.strip() == " ".join(expected)
    assert image.calls() == []


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_recipe_names_what_is_there(recipe, name):
    told = recipe(name)
    module, _, loop = told["user_defined_rollout_loop_cls"].rpartition(".")
    assert (module, loop in roll_adapter.__all__) == ("roll_adapter", True)
    judged = told["rewards"]["judged"]
    module, _, worker = judged["worker_cls"].rpartition(".")
    assert (module, worker in roll_adapter.__all__) == ("roll_adapter", True)
    assert judged["reward_manager_config"] == [{"config": "/judges.yaml"}]
    assert "device_mapping" not in judged
    # The only path that calls a rollout loop.
    assert told["generate_opt_level"] == 1
    assert told["is_num_return_sequences_expand"] is True


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_every_domain_has_data_and_a_worker_of_its_own(recipe, name):
    told = recipe(name)
    shares = told["actor_train"]["data_args"]["domain_interleave_probs"]
    assert set(shares) == set(told["rewards"])
    assert sum(shares.values()) == 1
    tags = [tag for domain in told["rewards"].values() for tag in domain["tag_included"]]
    assert len(tags) == len(set(tags))
    assert told["rewards"]["math_rule"]["worker_cls"].startswith("roll.pipeline.rlvr.rewards.")


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_sizes_of_a_recipe_agree(recipe, name):
    told = recipe(name)
    train, infer = told["actor_train"], told["actor_infer"]
    samples = told["rollout_batch_size"] * told["num_return_sequences_in_group"]
    learners = [(train, len(gpus(train)) // train["strategy_args"]["strategy_config"]["tensor_model_parallel_size"])]
    if name == "ppo":
        critic = told["critic"]
        assert told["adv_estimator"] == "gae"
        assert gpus(critic).isdisjoint(gpus(train))
        assert critic["strategy_args"]["strategy_config"]["fsdp_size"] == len(gpus(critic))
        learners.append((critic, len(gpus(critic))))
    else:
        assert told["adv_estimator"] == "grpo"
        # ROLL generates while it trains, so on other GPUs.
        assert told["async_generation_ratio"] >= 1
        assert gpus(infer).isdisjoint(gpus(train))
        assert 1 < judges_tree().groups.min_scored <= told["num_return_sequences_in_group"]
    assert gpus(train) | gpus(infer) | gpus(told["reference"]) <= set(range(8))
    for role, ranks in learners:
        sizes = role["training_args"]
        update = ranks * sizes["per_device_train_batch_size"] * sizes["gradient_accumulation_steps"]
        assert samples % update == 0
    window = told["prompt_length"] + told["response_length"]
    assert window <= infer["strategy_args"]["strategy_config"]["max_model_len"]
    # ROLL's default, below which the adapter keeps the deadline.
    assert judges_tree().engine.deadline_s <= 0.8 * told.get("rpc_timeout", 3600)


def test_a_dry_run_says_what_would_be_run_and_masks_what_the_judges_read(image):
    printed, environment, command = dry_run(image, "grpo")
    assert printed["adv_estimator"] == "grpo"
    assert printed["rewards"]["judged"]["reward_manager_config"] == [{"config": "${oc.env:QREWARD_CONFIG}"}]
    assert {name for name, value in environment.items() if value == "***"} == set(JUDGES)
    assert environment["QREWARD_CONFIG"] == str(image.recipes / "judges.yaml")
    assert environment["PYTHONPATH"] == str(image.roll)
    folder = os.path.relpath(os.path.realpath(image.recipes), os.path.realpath(image.roll / "examples"))
    start = str(image.roll / "examples" / "start_rlvr_pipeline.py")
    assert command[:3] == ["env", "-C", str(image.roll)]
    assert command[3:] == ["python3", start, "--config_path", folder, "--config_name", "grpo"]

    _, _, command = dry_run(image, "ppo", RAY_API_SERVER_ADDRESS="http://head.example:8265")
    assert command[:5] == ["ray", "job", "submit", "--address", "http://head.example:8265"]
    assert command[-2:] == ["--config_name", "ppo"]


def test_a_run_checks_the_judges_and_starts_roll_with_the_keys_in_its_environment(image):
    done = image.run("ppo")
    assert done.returncode == 0, done.stderr
    config = str(image.recipes / "judges.yaml")
    assert image.calls() == [["qreward", ["check", config], ""], ["start", [str(image.roll), "ppo"], KEY]]
    printed = yaml.safe_load(done.stdout)
    assert printed["adv_estimator"] == "gae"
    assert printed["rewards"]["judged"]["reward_manager_config"] == [{"config": config}]
    assert not [value for value in JUDGES.values() if value in done.stdout]


def test_a_ray_that_runs_gets_the_variables_by_its_job(image):
    done = image.run("grpo", RAY_RUNS="1")
    assert told_as_missing(done) == ["ray"]
    assert "RAY_API_SERVER_ADDRESS" in done.stderr
    assert image.calls() == []

    done = image.run("grpo", RAY_RUNS="1", RAY_API_SERVER_ADDRESS="http://head.example:8265", PRETRAIN="Qwen/X")
    assert done.returncode == 0, done.stderr
    check, (program, arguments, stdin) = image.calls()
    assert check[0] == "qreward"
    assert [program, *arguments[:2]] == ["ray", "job", "submit"]
    assert arguments[arguments.index("--runtime-env") + 1] == "/dev/stdin"
    assert json.loads(stdin)["env_vars"].items() >= {**JUDGES, "PRETRAIN": "Qwen/X"}.items()


def test_everything_that_is_missing_is_told_at_once(image):
    data = image.roll / "data" / f"{DATA[0]}.jsonl"
    data.unlink()
    done = image.run("grpo", PRETRAIN="/nowhere", HOSTED_MODEL=None, QREWARD_ENV="WANDB_API_KEY")
    assert told_as_missing(done) == ["grpo.yaml", "grpo.yaml", "HOSTED_MODEL", "WANDB_API_KEY"]
    assert f"{data} does not exist" in done.stderr
    data.touch()
    assert told_as_missing(image.run("grpo", ROLL_DIR="/nowhere"))[0] == "ROLL_DIR"
    assert told_as_missing(image.run("grpo", QREWARD_CONFIG="no.yaml")) == ["QREWARD_CONFIG"]
    assert image.calls() == []


def test_missing_programs_are_told_as_well(image):
    programs = image.root / "programs"
    programs.mkdir()
    for name in ("bash", "dirname", "grep", "sed", "sort"):
        (programs / name).symlink_to(shutil.which(name))
    (programs / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (programs / "python3").chmod(0o755)
    assert told_as_missing(image.run("grpo", PATH=str(programs))) == ["qreward", "ray"]


def test_a_recipe_of_one_s_own_goes_beside_the_others(image):
    mine = image.recipes / "mine.yaml"
    keys = {"max_steps": 3, "actor_train": {"data_args": {"file_name": ["mine.jsonl"]}}}
    mine.write_text(yaml.safe_dump({"defaults": ["grpo", "_self_"], **keys}))
    assert told_as_missing(image.run("mine")) == ["mine.yaml"]
    (image.roll / "mine.jsonl").touch()
    printed, _, _ = dry_run(image, "mine")
    assert (printed["max_steps"], printed["adv_estimator"]) == (3, "grpo")

    mine.write_text("defaults: [nobody, _self_]")
    done = image.run("mine")
    assert told_as_missing(done) == ["mine.yaml"]


def test_other_judges_bring_their_own_variables(image):
    judges = image.root / "own.yaml"
    judges.write_text("a: {url: '${oc.env:URL}', model: '${oc.env:MODEL,small}', api_key_env: \"KEY_OF_A\"}\n")
    _, environment, _ = dry_run(image, "grpo", QREWARD_CONFIG="own.yaml", URL="u", KEY_OF_A="k")
    assert {name for name, value in environment.items() if value == "***"} == {"URL", "KEY_OF_A"}
    assert environment["QREWARD_CONFIG"] == str(judges)
    done = image.run("grpo", QREWARD_CONFIG="own.yaml")
    assert sorted(told_as_missing(done)) == ["KEY_OF_A", "URL"]


@pytest.mark.parametrize(
    ("key", "trace"), [(KEY, False), (KEY, True), ('with \'quotes" \\ $HOME `id` {"json": 1}', False)]
)
@pytest.mark.parametrize(
    "variables",
    [
        {"QREWARD_DRY_RUN": "1"},
        {},
        {"FAILING": "qreward"},
        {"HOSTED_MODEL": None},
        {"RAY_API_SERVER_ADDRESS": "http://h:1"},
    ],
)
def test_no_key_is_shown(image, variables, trace, key):
    done = image.run("ppo", trace=trace, HOSTED_API_KEY=key, **variables)
    assert key not in done.stdout + done.stderr
    assert json.dumps(key)[1:-1] not in done.stdout + done.stderr
    for name, arguments, rest in image.calls():
        assert key not in " ".join(arguments)
        if rest and name == "ray":
            assert json.loads(rest)["env_vars"]["HOSTED_API_KEY"] == key


def judges_tree(**changed):
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("JUDGE_MODEL", raising=False)
        for name, value in {**JUDGES, "QREWARD_RULES": str(RECIPES / "rules.py"), **changed}.items():
            environment.setenv(name, value)
        return load_config(RECIPES / "judges.yaml")


def test_the_judges_are_valid_and_hold_no_key():
    config = judges_tree()
    own, hosted = config.sources["own"], config.sources["hosted"]
    assert own.limits.concurrency
    assert hosted.limits.requests_per_minute
    assert hosted.limits.tokens_per_minute
    assert hosted.api_key_env == "HOSTED_API_KEY"
    assert config.on_failure == "exclude"
    assert KEY not in repr(config)
    assert not re.search(r"api_key:", (RECIPES / "judges.yaml").read_text())


def test_correct_means_the_same_to_the_sum_and_to_its_judge():
    config = judges_tree()
    total, quality = config.judges["total"], config.judges["quality"]
    assert sum(total.weights.values()) == 1
    least = total.weights["quality"] * quality.correct_at + total.weights["format"]
    assert total.correct_at < least
    # The next lower score of the judge is not correct.
    assert total.correct_at > least - total.weights["quality"] * 0.1


def test_the_judges_score_a_data_set_by_several_rewards_and_another_by_one(monkeypatch):
    def grade(call):
        right = call.blocks["reference"] in call.blocks["response"]
        return {"score": 10.0 if right else 5.0, "components": dict.fromkeys(call.criteria, 5.0)}

    def sample(data_source, response):
        return Sample(
            messages=[{"role": "user", "content": "17 + 25?"}],
            response=response,
            ground_truth="42",
            data_source=data_source,
        )

    async def scored(config):
        samples = [
            sample("RLVR", "17 + 25 is 42. Therefore, the answer is 42."),
            sample("RLVR", "It is 42."),
            sample("RLVR", "17 + 25 is 43. Therefore, the answer is 43."),
            sample("gpqa_diamond_boxed", "42"),
        ]
        async with RewardEngine(config) as engine:
            return await engine.score_all(samples)

    monkeypatch.setenv("HOSTED_API_KEY", KEY)
    with JudgeServer(grade) as server:
        url = server.base_url
        config = judges_tree(JUDGE_BASE_URL=url, JUDGE_MODEL="judge", HOSTED_BASE_URL=url, HOSTED_MODEL="judge")
        outcomes = asyncio.run(scored(config))
    assert [outcome.reward for outcome in outcomes] == pytest.approx([1.0, 0.8, 0.6, 1.0])
    assert [outcome.verdict.correct for outcome in outcomes] == [True, True, False, True]


def import_file(name):
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("2 and 2 is 4. Therefore, the answer is 4.", 1.0),
        ("Therefore, the answer is 4.", 0.0),
        ("2 and 2 is 4. Therefore, the answer is ", 0.0),
        ("a Therefore, the answer is 4. Therefore, the answer is 5.", 0.0),
        ("4", 0.0),
        ("", 0.0),
    ],
)
def test_the_rule_wants_the_answer_stated_once_and_at_the_end(response, reward):
    rules = import_file("rules")
    assert rules.states_its_answer(data_source="RLVR", solution_str=response, ground_truth="4", extra_info={}) == reward


def test_the_env_manager_is_judged_before_roll_makes_its_rollout(monkeypatch):
    path = "roll.pipeline.agentic.env_manager.traj_env_manager"
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    sys.modules[path].TrajEnvManager = type("TrajEnvManager", (), {"formulate_rollouts": lambda self, cache: None})
    manager = import_file("env_managers").JudgedTrajEnvManager
    assert issubclass(manager, sys.modules[path].TrajEnvManager)
    assert manager.formulate_rollouts is roll_adapter.QRewardTrajectoryMixin.formulate_rollouts


@pytest.mark.parametrize("file", ["README.md", "base.yaml", "judges.yaml", "run.sh"])
def test_what_the_recipe_says_of_the_adapter_is_true(file):
    for name in re.findall(r"\broll_adapter\.(\w+)", (RECIPES / file).read_text()):
        assert name in roll_adapter.__all__
