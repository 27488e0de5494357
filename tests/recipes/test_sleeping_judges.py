"""The recipes whose judge sleeps on the trainer's GPUs, and what the dry run says of such a judge."""

from __future__ import annotations

import copy
import importlib
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from qreward_plugins.config import load_config
from roll_adapter.settings import phases_problem
from slime_adapter.phases import problem_of as slime_problem_of

RECIPES = Path(__file__).parents[2] / "recipes"
SLEEPING = RECIPES / "judges" / "sleeping.yaml"


def tree(server="vllm", **arguments):
    own = {"kind": "replicas", "server": server, "model": "m", "devices": [0, 1], "colocated": True}
    return {"sources": {"own": {**own, "arguments": arguments}}, "judges": {"quality": {"kind": "llm"}}}


@pytest.mark.parametrize(
    ("config", "engine", "problem", "status"),
    [
        (tree(gpu_memory_utilization=0.35), 0.5, "", "ok"),
        (tree(gpu_memory_utilization=0.35), 0.8, "", "FAIL"),
        (tree(), 0.5, "", "FAIL"),
        (tree("sglang", mem_fraction_static=0.5), 0.5, "", "FAIL"),
        (tree(gpu_memory_utilization=0.35), 0.5, "it asks while it trains.", "FAIL"),
    ],
)
def test_a_sleeping_judge_fits_beside_the_inference_engine(recipe_tools, config, engine, problem, status):
    config = load_config(config)
    (line,) = recipe_tools.judging.sleeping_lines(config, problem, engine_share=engine, key="the engine's share")
    assert line.status == status, line
    assert bool(line.remedy) is (status == "FAIL")
    assert (problem in line.found) or line.found.startswith("own sleeps while the trainer trains")


def test_verls_recipe_leaves_room_for_the_judge(recipe_tools, monkeypatch):
    pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
    from verl_adapter.settings import load_settings

    verl_recipe = importlib.import_module("dryrun.verl_recipe")
    monkeypatch.setenv("QREWARD_CONFIG", str(SLEEPING))
    config = verl_recipe.compose(RECIPES / "verl", "grpo_sleeping", [])
    settings = load_settings(config)
    (line,) = verl_recipe._sleeping(config, settings)
    assert (line.status, line.found) == (
        "ok",
        "own sleeps while the trainer trains; gpu_memory_utilization 0.35, beside 0.5 of "
        "actor_rollout_ref.rollout.gpu_memory_utilization",
    )
    other = copy.deepcopy(config)
    other.actor_rollout_ref.actor.fsdp_config.param_offload = False
    other.trainer.v1.trainer_mode = "separate_async"
    noted, refused = verl_recipe._sleeping(other, settings)
    assert noted.status == "note"
    assert (refused.status, refused.found.startswith("verl's trainer separate_async asks")) == ("FAIL", True)


def test_slimes_recipe_has_the_hooks_that_let_the_judge_sleep(recipe_tools):
    script = (RECIPES / "slime" / "run.sh").read_text()
    assert "--colocate\n" in script
    assert "--custom-reward-post-process-path slime_adapter.post_process" in script
    # As slime's parser leaves them, before slime resolves them.
    args = Namespace(colocate=True, offload_train=None, custom_reward_post_process_path="slime_adapter.post_process")
    assert slime_problem_of(args) == ("", "")


def test_rolls_recipe_is_synchronous_and_leaves_room_for_the_judge():
    recipe = OmegaConf.load(RECIPES / "roll" / "ppo_sleeping.yaml")
    assert recipe.defaults[0] == "ppo"
    assert "async_generation_ratio" not in OmegaConf.load(RECIPES / "roll" / "ppo.yaml")
    engine = recipe.actor_infer.strategy_args.strategy_config.gpu_memory_utilization
    judge = load_config(SLEEPING).sources["own"].arguments["gpu_memory_utilization"]
    assert engine + judge <= 0.95
    assert phases_problem(SimpleNamespace(async_pipeline=False)) == ""
    assert "async_generation_ratio above 0" in phases_problem(SimpleNamespace(async_pipeline=True))
