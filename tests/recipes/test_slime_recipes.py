"""The slime recipes: what their script would run, what it refuses, and that no key shows up anywhere on the way.

The script runs for real, up to the commands it starts: `ray` and `qreward` are stand-ins that write down how they were
called, in a folder that looks like slime's image to the script.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from qreward_plugins import RewardEngine, load_config

RECIPES = Path(__file__).parents[2] / "recipes" / "slime"
SCRIPT = RECIPES / "run.sh"
BASH = shutil.which("bash") or "bash"
KEY = "sk-never-shown-4711"
JUDGES = {
    "JUDGE_BASE_URL": "http://judge.example:8000/v1",
    "HOSTED_BASE_URL": "https://hosted.example/v1",
    "HOSTED_MODEL": "judge-large",
    "HOSTED_API_KEY": KEY,
}
HOOKS = {
    "--custom-rm-path": "slime_adapter.reward",
    "--data-source-path": "slime_adapter.DataSource",
    "--custom-reward-post-process-path": "slime_adapter.post_process",
    "--custom-rollout-log-function-path": "slime_adapter.log_rollout",
    "--custom-eval-rollout-log-function-path": "slime_adapter.log_eval",
}
FILTER = {"--dynamic-sampling-filter-path": "slime_adapter.drop_failed_groups"}
STAND_IN = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
stdin = sys.stdin.read() if "submit" in sys.argv else ""
entry = [name, sys.argv[1:], stdin, os.environ.get("QREWARD_CONFIG")]
with open({log!r}, "a") as log:
    log.write(json.dumps(entry) + "\\n")
sys.exit(name in os.environ.get("FAILING", "").split())
"""


@pytest.fixture
def image(tmp_path):
    """`run(*arguments, **variables)` runs the script in a complete setting; None takes a variable away."""
    (tmp_path / "slime" / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "slime" / "train.py").touch()
    (tmp_path / "slime" / "scripts" / "models" / "qwen3-4B.sh").write_text('MODEL_ARGS=(--normalization "RMSNorm")\n')
    for folder in ("megatron", "model", "model_torch_dist", "bin"):
        (tmp_path / folder).mkdir()
    for file in ("train.jsonl", "eval.jsonl"):
        (tmp_path / file).touch()
    log = tmp_path / "log"
    for name in ("ray", "qreward"):
        program = tmp_path / "bin" / name
        program.write_text(STAND_IN.format(python=sys.executable, log=str(log)))
        program.chmod(0o755)
    environment = {
        "PATH": os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(tmp_path),
        "SLIME_DIR": str(tmp_path / "slime"),
        "MEGATRON_DIR": str(tmp_path / "megatron"),
        "HF_CHECKPOINT": str(tmp_path / "model"),
        "PROMPT_DATA": str(tmp_path / "train.jsonl"),
        "EVAL_DATA": str(tmp_path / "eval.jsonl"),
        **JUDGES,
    }

    def run(*arguments, trace=False, **variables):
        wanted = {**environment, **variables}
        command = [BASH, *(["-x"] if trace else []), str(SCRIPT), *arguments]
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
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    return SimpleNamespace(run=run, calls=calls, root=tmp_path)


def dry_run(image, *arguments, **variables):
    """The job's environment, its command, and everything before them, as the script prints them."""
    done = image.run(*arguments, QREWARD_DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    assert image.calls() == []
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


def test_the_script_is_sound_shell_and_says_how_it_is_used():
    subprocess.run([BASH, "-n", str(SCRIPT)], check=True)
    assert os.access(SCRIPT, os.X_OK)
    for arguments in ([], ["dpo"]):
        done = subprocess.run([BASH, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: recipes/slime/run.sh"), "without the shell's own line"


@pytest.mark.parametrize(("recipe", "hooks"), [("grpo", {**HOOKS, **FILTER}), ("ppo", HOOKS)])
def test_a_recipe_sets_exactly_these_hooks(image, recipe, hooks):
    _, command, _ = dry_run(image, recipe)
    flags = flags_of(command)
    assert {name: value for name, value in flags.items() if "slime_adapter" in value} == hooks
    assert flags["--custom-config-path"] == str(RECIPES / "qreward.yaml")
    assert flags["--normalization"] == "RMSNorm"
    assert command[: command.index("--")][:3] == ["ray", "job", "submit"]
    assert command[command.index("--") :][:3] == ["--", "python3", str(image.root / "slime" / "train.py")]


@pytest.mark.parametrize("path", sorted({*HOOKS.values(), *FILTER.values()}))
def test_what_a_hook_names_is_there(path):
    module, _, name = path.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(("recipe", "estimator"), [("grpo", "grpo"), ("ppo", "ppo")])
def test_the_sizes_of_a_recipe_agree(image, recipe, estimator):
    _, command, _ = dry_run(image, recipe)
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


def test_a_flag_of_the_user_wins(image):
    _, command, _ = dry_run(image, "grpo", "--num-rollout", "2", "--use-wandb")
    assert command[-3:] == ["--num-rollout", "2", "--use-wandb"]
    assert flags_of(command)["--num-rollout"] == "2"


def test_everything_that_is_missing_is_told_at_once(image):
    done = image.run("grpo", SLIME_DIR="/nowhere/slime", EVAL_DATA="/nowhere/e.jsonl", HOSTED_MODEL=None)
    assert done.returncode == 2
    assert done.stdout == ""
    first, *rest = done.stderr.splitlines()
    assert first == "recipes/slime/run.sh: cannot start:"
    assert [line.split(":")[0].strip() for line in rest] == ["SLIME_DIR", "SLIME_DIR", "EVAL_DATA", "HOSTED_MODEL"]
    assert "zhuzilin/aime-2024 --local-dir /nowhere)" in done.stderr, "where the script looks for it"
    assert image.calls() == []
    assert image.run("grpo", PROMPT_DATA=str(image.root / "train.jsonl@[0:64]"), QREWARD_DRY_RUN="1").returncode == 0


def test_missing_programs_are_told_as_well(image):
    python = image.root / "python"
    python.mkdir()
    for name in ("bash", "dirname", "grep", "sed", "sort", "python3"):
        (python / name).symlink_to(shutil.which(name))
    done = image.run("grpo", PATH=str(python))
    assert done.returncode == 2
    assert [line.split(":")[0].strip() for line in done.stderr.splitlines()[1:]] == ["qreward", "ray"]


def test_a_configuration_without_the_one_key_is_named_in_the_environment_of_the_job(image):
    judges = image.root / "judges.yaml"
    judges.write_text(yaml.safe_dump(yaml.safe_load((RECIPES / "qreward.yaml").read_text())["qreward"]))
    environment, command, _ = dry_run(image, "grpo", QREWARD_CONFIG="judges.yaml")
    assert environment["QREWARD_CONFIG"] == str(judges)
    assert "--custom-config-path" not in flags_of(command)
    environment, _, _ = dry_run(image, "grpo")
    assert "QREWARD_CONFIG" not in environment, "slime hands the tree on; named as well, it would be read twice"


def test_a_configuration_without_sources_is_refused(image):
    (image.root / "judges.yaml").write_text("judges: {}\n")
    done = image.run("grpo", QREWARD_CONFIG="judges.yaml")
    assert done.returncode == 2
    assert "no key `qreward`" in done.stderr


def test_the_job_gets_the_variables_that_the_configuration_reads(image):
    judges = image.root / "own.yaml"
    judges.write_text(
        "qreward:\n"
        "  # ${oc.env:IN_A_COMMENT}\n"
        "  a: {url: '${oc.env:URL}', model: '${oc.env:MODEL,small}', key: ${oc.env:OPTIONAL, none}}\n"
        '  b: {api_key_env: "KEY_OF_B", price: 1}\n'
    )
    variables = {"URL": "u", "KEY_OF_B": "k", "MORE": "m", "QREWARD_ENV": "MORE"}
    environment, command, _ = dry_run(image, "grpo", QREWARD_CONFIG="own.yaml", PYTHONPATH="/mine", **variables)
    assert {name for name, value in environment.items() if value == "***"} == {"URL", "KEY_OF_B", "MORE"}
    assert environment["PYTHONPATH"] == f"{image.root}/megatron:{image.root}/slime:/mine"
    # Ray runs the job elsewhere, so a relative path would lead nowhere.
    assert flags_of(command)["--custom-config-path"] == str(judges)

    environment, _, _ = dry_run(image, "grpo", QREWARD_CONFIG="own.yaml", MODEL="big", **variables)
    assert environment["MODEL"] == "***"
    done = image.run("grpo", QREWARD_CONFIG="own.yaml", QREWARD_DRY_RUN="1", QREWARD_ENV="MORE")
    told = [line.strip() for line in done.stderr.splitlines()[1:]]
    assert sorted(told) == ["KEY_OF_B: not set", "MORE: not set", "URL: not set"]


def test_a_configuration_may_read_no_variables_and_home_is_that_of_each_machine(image):
    (image.root / "plain.yaml").write_text("qreward: {sources: {}, judges: {}}\n")
    environment, _, _ = dry_run(image, "grpo", QREWARD_CONFIG="plain.yaml")
    assert "***" not in environment.values()
    (image.root / "home.yaml").write_text("qreward: {engine: {journal: {path: '${oc.env:HOME}/v.sqlite'}}}\n")
    environment, _, _ = dry_run(image, "grpo", QREWARD_CONFIG="home.yaml")
    assert "HOME" not in environment


def test_a_judge_that_slime_serves_is_not_asked_before(image):
    judges = image.root / "served.yaml"
    judges.write_text("qreward:\n  sources: {own: {base_url: framework://reward/v1}}\n")
    assert image.run("grpo", QREWARD_CONFIG="served.yaml").returncode == 0
    assert [name for name, *_ in image.calls()] == ["ray", "ray"]
    judges.write_text("qreward: {sources: {own: {base_url: http://judge/v1}}}  # not framework://reward\n")
    assert image.run("grpo", QREWARD_CONFIG="served.yaml").returncode == 0
    assert image.calls()[2][0] == "qreward"


def test_a_run_checks_the_judges_starts_ray_and_submits(image):
    done = image.run("grpo", QREWARD_CONFIG=str(RECIPES / "qreward.yaml"))
    assert done.returncode == 0, done.stderr
    (check, start, submit) = image.calls()
    assert check[:2] == ["qreward", ["check", str(RECIPES / "qreward.yaml")]]
    assert start[0] == "ray"
    assert start[1][:2] == ["start", "--head"]
    assert "--dashboard-host" not in " ".join(start[1])
    _, arguments, stdin, config = submit
    assert arguments[:2] == ["job", "submit"]
    assert arguments[arguments.index("--runtime-env") + 1] == "/dev/stdin"
    assert json.loads(stdin)["env_vars"].items() >= JUDGES.items()
    assert config is None

    _, printed, _ = dry_run(SimpleNamespace(run=image.run, calls=list), "grpo")
    assert printed == ["ray", *arguments]


def test_a_ray_that_runs_is_used(image):
    done = image.run("ppo", RAY_API_SERVER_ADDRESS="http://head.example:8265")
    assert done.returncode == 0, done.stderr
    assert [(name, arguments[0]) for name, arguments, _, _ in image.calls()] == [("qreward", "check"), ("ray", "job")]
    assert image.calls()[-1][1][:4] == ["job", "submit", "--address", "http://head.example:8265"]


@pytest.mark.parametrize(("failing", "last"), [("qreward", "check"), ("ray", "start")])
def test_a_failure_on_the_way_ends_the_run(image, failing, last):
    done = image.run("grpo", FAILING=failing)
    assert done.returncode == 1
    assert image.calls()[-1][1][0] == last


@pytest.mark.parametrize("key", [KEY, 'with \'quotes" \\ $HOME `id` {"json": 1}'])
@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("variables", [{"QREWARD_DRY_RUN": "1"}, {}, {"FAILING": "ray"}, {"HOSTED_MODEL": None}])
def test_no_key_is_shown(image, variables, trace, key):
    done = image.run("ppo", trace=trace, HOSTED_API_KEY=key, **variables)
    assert key not in done.stdout + done.stderr
    assert json.dumps(key)[1:-1] not in done.stdout + done.stderr
    for _, arguments, stdin, _ in image.calls():
        assert key not in " ".join(arguments)
        if stdin:
            assert json.loads(stdin)["env_vars"]["HOSTED_API_KEY"] == key
            assert yaml.safe_load(stdin) == json.loads(stdin), "Ray reads it as YAML"


def test_the_critic_has_checkpoints_of_its_own_and_goes_on_from_them(image):
    roles = image.root / "save" / "roles.yaml"
    _, command, printed = dry_run(image, "ppo", SAVE="save")
    assert flags_of(command)["--megatron-config-path"] == str(roles)
    assert not roles.exists()

    assert image.run("ppo", SAVE="save").returncode == 0
    (entry,) = yaml.safe_load(roles.read_text())["megatron"]
    assert roles.read_text().strip() in printed
    assert entry["role"] == "critic"
    critic = str(image.root / "save" / "critic")
    # It begins with what the actor begins with: a path without a checkpoint would be an error of slime's.
    assert entry["overrides"] == {"lr": 1e-5, "save": critic}
    assert flags_of(command)["--save"] != critic

    Path(critic).mkdir()
    (Path(critic) / "latest_checkpointed_iteration.txt").touch()
    assert image.run("ppo", SAVE="save").returncode == 0
    (entry,) = yaml.safe_load(roles.read_text())["megatron"]
    assert entry["overrides"] == {"lr": 1e-5, "save": critic, "load": critic}


def load_tree():
    """The configuration as the adapter gets it: slime reads the file, and hands on what is below its one key."""
    read = yaml.safe_load((RECIPES / "qreward.yaml").read_text())
    assert list(read) == ["qreward"]
    with pytest.MonkeyPatch.context() as environment:
        for name, value in JUDGES.items():
            environment.setenv(name, value)
        environment.delenv("JUDGE_MODEL", raising=False)
        return load_config(read["qreward"], origin="qreward.yaml")


def test_the_configuration_is_valid_and_holds_no_key(monkeypatch):
    config = load_tree()
    own, hosted = config.sources["own"], config.sources["hosted"]
    assert own.limits.concurrency
    assert hosted.limits.requests_per_minute
    assert hosted.limits.tokens_per_minute
    assert hosted.api_key_env == "HOSTED_API_KEY"
    assert config.on_failure == "exclude"
    assert KEY not in repr(config)
    assert not re.search(r"api_key:", (RECIPES / "qreward.yaml").read_text())
    monkeypatch.setenv("HOSTED_API_KEY", KEY)
    engine = RewardEngine(config)
    assert set(engine.upstreams) == {"own", "hosted"}
    assert engine.judges["quality"].sources == ("own", "hosted")


@pytest.mark.parametrize("file", ["README.md", "qreward.yaml", "run.sh"])
def test_what_the_recipe_says_of_the_adapter_is_true(file):
    adapter = importlib.import_module("slime_adapter")
    for name in re.findall(r"\bslime_adapter\.(\w+)", (RECIPES / file).read_text()):
        assert callable(getattr(adapter, name))
