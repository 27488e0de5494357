"""The ROLL recipes: what they compose to, what their script runs and refuses, and that no key shows up on the way.

The script runs for real, up to what it starts: `ray`, `qreward` and ROLL's start script are stand-ins. That of the
start script composes the configuration as ROLL's own does, prints it as ROLL does, and writes down what it was given.
Whether ROLL's dataclasses have all the keys is tested where ROLL is (tests/conformance/roll).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import roll_adapter
from qreward_plugins import RewardEngine, Sample
from qreward_plugins.testing import JudgeServer

from .conftest import ROLL_DATA
from .launching import JUDGES, KEY, judges_of
from .launching import RECIPES as ALL

RECIPES = ALL / "roll"


def dry_run(roll, *arguments, **variables):
    """The recipe, the environment and the command, as the script prints them."""
    done = roll.run(*arguments, QREWARD_DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    assert roll.calls() == []
    recipe, _, rest = done.stdout.partition("\n# environment\n")
    environment, _, command = rest.strip().splitlines()
    return yaml.safe_load(recipe), json.loads(environment)["env_vars"], shlex.split(command)


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


def test_a_dry_run_says_what_would_be_run_and_masks_what_the_judges_read(roll):
    printed, environment, command = dry_run(roll, "grpo")
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


def test_a_ray_that_runs_gets_the_variables_by_its_job(roll):
    assert roll.missing("grpo", RAY_RUNS="1") == ["ray"]
    assert roll.calls() == []

    done = roll.run("grpo", RAY_RUNS="1", RAY_API_SERVER_ADDRESS="http://head.example:8265", PRETRAIN="Qwen/X")
    assert done.returncode == 0, done.stderr
    check, (program, arguments, stdin) = roll.calls()
    assert check[0] == "qreward"
    assert [program, *arguments[:4]] == ["ray", "job", "submit", "--address", "http://head.example:8265"]
    assert arguments[-2:] == ["--config_name", "grpo"]
    assert arguments[arguments.index("--runtime-env") + 1] == "/dev/stdin"
    assert json.loads(stdin)["env_vars"].items() >= {**JUDGES, "PRETRAIN": "Qwen/X"}.items()


def test_everything_that_is_missing_is_told_at_once(roll):
    data = roll.root / "roll" / "data" / f"{ROLL_DATA[0]}.jsonl"
    data.unlink()
    variables = {"PRETRAIN": "/nowhere", "HOSTED_MODEL": None, "QREWARD_ENV": "WANDB_API_KEY"}
    assert roll.missing("grpo", **variables) == ["grpo.yaml", "grpo.yaml", "HOSTED_MODEL", "WANDB_API_KEY"]
    data.touch()
    assert roll.missing("grpo", ROLL_DIR="/nowhere", QREWARD_CONFIG="no.yaml")[0] == "ROLL_DIR"
    assert roll.calls() == []


def judges_tree(**changed):
    return judges_of(RECIPES / "judges.yaml", QREWARD_RULES=str(RECIPES / "rules.py"), **changed)


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


def test_a_recipe_of_one_s_own_goes_beside_the_others(roll):
    mine = roll.script.parent / "mine.yaml"
    keys = {"max_steps": 3, "actor_train": {"data_args": {"file_name": ["mine.jsonl"]}}}
    mine.write_text(yaml.safe_dump({"defaults": ["grpo", "_self_"], **keys}))
    assert roll.missing("mine") == ["mine.yaml"]
    (roll.root / "roll" / "mine.jsonl").touch()
    printed, _, _ = dry_run(roll, "mine")
    assert (printed["max_steps"], printed["adv_estimator"]) == (3, "grpo")
