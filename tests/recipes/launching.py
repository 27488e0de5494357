"""Runs the run.sh of a recipe, with stand-ins for the programs that it starts."""

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
