"""What the run.sh of all recipes do alike: usage, dry runs, a Ray that runs, and no key anywhere on the way."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess

import pytest
import yaml

from .launching import BASH, JUDGES, KEY, RECIPES, Launch, judges_of

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
