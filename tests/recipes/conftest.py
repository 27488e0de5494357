"""The modules of the CPU recipe and of the tools, which are scripts beside each other and not a package; and what runs
the run.sh of a recipe, with stand-ins for the programs that it starts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qreward_plugins.config import Config, load_config

from ..kit import scripts

RECIPES = Path(__file__).parents[2] / "recipes"
BASH = shutil.which("bash") or "bash"
KEY = "sk-never-shown-4711"
JUDGES = {
    "JUDGE_BASE_URL": "http://judge.example:8000/v1",
    "HOSTED_BASE_URL": "https://hosted.example/v1",
    "HOSTED_MODEL": "judge-large",
    "HOSTED_API_KEY": KEY,
}
STAND_IN = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
if sys.argv[1:2] == ["-c"]:  # the script's own lines of Python
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
stdin = sys.stdin.read() if "submit" in sys.argv else ""
with open({log!r}, "a") as log:
    log.write(json.dumps([name, sys.argv[1:], stdin]) + "\\n")
if sys.argv[1:] == ["status"]:
    sys.exit(not os.environ.get("RAY_RUNS"))
sys.exit(name in os.environ.get("FAILING", "").split())
"""


def judges_of(source: Any, **changed: str) -> Config:
    """A configuration of judges with the variables in `JUDGES`."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("JUDGE_MODEL", raising=False)
        for name, value in {**JUDGES, **changed}.items():
            environment.setenv(name, value)
        return load_config(source)


class Launch:
    """Runs `script` in the folder `root` with the variables of the judges and those given; None takes one away."""

    def __init__(self, root: Path, script: Path, *, programs: tuple[str, ...] = ("ray", "qreward"), **variables: str):
        self.root, self.script, self.log = root, script, root / "log"
        folder = root / "bin"
        folder.mkdir()
        for name in programs:
            (folder / name).write_text(STAND_IN.format(python=sys.executable, log=str(self.log)))
            (folder / name).chmod(0o755)
        path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
        self._variables = {"PATH": path, "HOME": str(root), **JUDGES, **variables}

    def run(self, *arguments: str, trace: bool = False, **variables: str | None) -> subprocess.CompletedProcess[str]:
        wanted = {**self._variables, **variables}
        return subprocess.run(
            [BASH, *(["-x"] if trace else []), str(self.script), *arguments],
            env={name: value for name, value in wanted.items() if value is not None},
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def dry_run(self, *arguments: str, **variables: str | None) -> list[str]:
        """The lines that a dry run prints. It starts nothing."""
        done = self.run(*arguments, QREWARD_DRY_RUN="1", **variables)
        assert done.returncode == 0, done.stderr
        assert self.calls() == []
        return done.stdout.splitlines()

    def calls(self) -> list[list]:
        """What the programs were given: name, arguments, standard input. Whether Ray runs may be asked at any time."""
        told = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [call for call in told if call[:2] != ["ray", ["status"]]]

    def missing(self, *arguments: str, **variables: str | None) -> list[str]:
        """What a start is refused for."""
        done = self.run(*arguments, **variables)
        assert (done.returncode, done.stdout) == (2, "")
        first, *rest = done.stderr.splitlines()
        assert first == f"recipes/{self.script.parent.name}/run.sh: cannot start:"
        return [line.strip().split(":")[0] for line in rest]


@pytest.fixture(scope="session")
def cpu_recipe():
    """Its modules as attributes, and its folder."""
    pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install 'qreward-plugins[demo]')")
    folder = RECIPES / "verl" / "cpu"
    with scripts(folder, "scorer", "tasks", "training", "llama_server", "demo") as found:
        found.folder = folder
        yield found


@pytest.fixture(scope="session")
def recipe_tools():
    """`prepare_data`, `dry_run`, and the modules of `dataset` and `dryrun` that need no framework, as attributes."""
    dataset = [f"dataset.{name}" for name in ("files", "formats", "checks")]
    dryrun = [f"dryrun.{name}" for name in ("lines", "machine", "data_lines", "judging", "roll_recipe")]
    with scripts(RECIPES, "prepare_data", "dry_run", *dataset, *dryrun) as found:
        yield found


@pytest.fixture(autouse=True)
def journal_of_its_own(monkeypatch, tmp_path):
    """The recipes record verdicts; without this variable, in the current folder."""
    monkeypatch.setenv("QREWARD_JOURNAL", str(tmp_path / "qreward.sqlite"))


@pytest.fixture
def slime(tmp_path):
    """The script of slime's recipes, in a folder that looks like slime's image to it."""
    models = tmp_path / "slime" / "scripts" / "models"
    for folder in (models, *(tmp_path / name for name in ("megatron", "model", "model_torch_dist"))):
        folder.mkdir(parents=True)
    (models / "qwen3-4B.sh").write_text('MODEL_ARGS=(--normalization "RMSNorm")\n')
    paths = {"SLIME_DIR": "slime", "MEGATRON_DIR": "megatron", "HF_CHECKPOINT": "model"}
    data = {"PROMPT_DATA": "train.jsonl", "EVAL_DATA": "eval.jsonl"}
    for file in ("slime/train.py", *data.values()):
        (tmp_path / file).touch()
    given = {name: str(tmp_path / path) for name, path in {**paths, **data}.items()}
    return Launch(tmp_path, RECIPES / "slime" / "run.sh", **given)


ROLL_DATA = ("llm_judge_Multi-subject-RLVR_deal_new", "math_deepmath_deal", "gpqa_diamond_boxed")
ROLL_START = """
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
def roll(tmp_path):
    """The script of ROLL's recipes, beside a checkout whose start script composes the configuration as ROLL's does,
    and prints it.
    """
    checkout, recipes = tmp_path / "roll", tmp_path / "recipes" / "roll"
    (checkout / "examples").mkdir(parents=True)
    (checkout / "data").mkdir()
    for name in ROLL_DATA:
        (checkout / "data" / f"{name}.jsonl").touch()
    # A copy, so that a test can put a recipe of its own beside the others.
    shutil.copytree(RECIPES / "roll", recipes, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(RECIPES / "common.sh", recipes.parent)
    launch = Launch(tmp_path, recipes / "run.sh", ROLL_DIR=str(checkout))
    (checkout / "examples" / "start_rlvr_pipeline.py").write_text(ROLL_START.format(log=str(launch.log)))
    return launch
