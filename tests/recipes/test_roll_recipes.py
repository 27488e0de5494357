"""The ROLL recipes: what they compose to, what their script runs and refuses, and that no key shows up on the way.

The script runs for real, up to what it starts: `ray`, `qreward` and ROLL's start script are stand-ins. That of the
start script composes the configuration as ROLL's own does, prints it as ROLL does, and writes down what it was given.
Whether ROLL's dataclasses have all the keys is tested where ROLL is (tests/conformance/roll).
"""

from __future__ import annotations

import json
import os
import re
import shlex

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

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
    told = recipe(name)
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
        assert 1 < judges_tree().groups.min_scored <= told["num_return_sequences_in_group"]
    sizes = train["training_args"]
    ranks = len(gpus(train)) // train["strategy_args"]["strategy_config"]["tensor_model_parallel_size"]
    update = ranks * sizes["per_device_train_batch_size"] * sizes["gradient_accumulation_steps"]
    assert told["rollout_batch_size"] * told["num_return_sequences_in_group"] % update == 0
    # ROLL's default, below which the adapter wants the deadline.
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
