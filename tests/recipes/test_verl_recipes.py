"""The recipes for GPUs: they compose over verl's own configuration, and every key in them is one that verl knows."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")

RECIPES = Path(__file__).parents[2] / "recipes" / "verl"
OURS = {"qreward", "hydra", "defaults"}


@pytest.fixture(scope="module")
def compose():
    """The configuration that `recipes/verl/run.sh NAME` hands to verl, as verl's own entry point composes it."""
    from verl.trainer import main_ppo

    composed = {}

    def make(name):
        if name not in composed:
            command = ["main_ppo", "--config-dir", str(RECIPES), "--config-name", name, "--cfg", "job", "--resolve"]
            printed = io.StringIO()
            with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
                patch.setenv("QREWARD_CONFIG", str(RECIPES / "judges.yaml"))
                patch.setattr(sys, "argv", command)
                main_ppo.main()
            composed[name] = OmegaConf.create(printed.getvalue())
        return composed[name]

    return make


def leaves(tree, path=""):
    for key, value in tree.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            yield from leaves(value, here)
        else:
            yield here


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_every_key_is_one_of_verls(name):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        base = hydra_compose("ppo_trainer")
    written = OmegaConf.to_container(OmegaConf.load(RECIPES / f"{name}.yaml"), resolve=False)
    known = set(leaves(OmegaConf.to_container(base, resolve=False)))
    unknown = [key for key in leaves(written) if key.split(".")[0] not in OURS and key not in known]
    assert unknown == []


@pytest.mark.parametrize(("name", "estimator", "critic"), [("grpo", "grpo", False), ("ppo", "gae", True)])
def test_a_recipe_composes_as_main_ppo_does_and_selects_qreward(compose, name, estimator, critic):
    from verl.trainer.ppo.utils import need_critic

    config = compose(name)
    assert config.reward.reward_manager.name == "qreward"
    assert config.algorithm.adv_estimator == estimator
    assert need_critic(config) is critic
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n % config.trainer.n_gpus_per_node == 0


@pytest.mark.parametrize(("name", "policy"), [("grpo", "neutral"), ("ppo", "exclude")])
def test_the_judges_of_the_recipe_are_valid_for_its_reward_workers(compose, name, policy, monkeypatch):
    from qreward_plugins import RewardEngine
    from verl_adapter.policy import failure_policy
    from verl_adapter.settings import load_settings, processes_of

    for variable, value in {"BASE_URL": "https://judge.example/v1", "MODEL": "m", "API_KEY": "sk-example-key"}.items():
        monkeypatch.setenv(f"HOSTED_{variable}", value)
    config = compose(name)
    settings = load_settings(config)
    assert failure_policy(settings, config) == policy
    engine = RewardEngine(settings, processes=processes_of(config))
    assert set(engine.upstreams) == {"local", "hosted"}
    assert engine.judges["quality"].sources == ("local", "hosted")


def test_the_launch_script_is_sound_shell():
    script = RECIPES / "run.sh"
    subprocess.run([shutil.which("bash") or "bash", "-n", str(script)], check=True)
    usage = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert usage.returncode != 0
    assert "usage:" in usage.stderr
