"""Runs what stands in recipes/ as a user would: the preparation of data, and a recipe's script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import qreward_plugins

RECIPES = Path(qreward_plugins.__file__).parents[1] / "recipes"
ENDPOINTS = dict.fromkeys(("JUDGE_BASE_URL", "HOSTED_BASE_URL", "HOSTED_MODEL"), "http://127.0.0.1:1/v1")
SECRET = "sk-never-shown"


def prepared(framework: str, folder: Path) -> Path:
    """A data set of three questions that recipes/prepare_data.py made."""
    questions, made = folder / "questions.jsonl", folder / "train.jsonl"
    rows = [{"question": f"What is {number}+1?", "answer": f"So.\n#### {number + 1}"} for number in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(RECIPES / "prepare_data.py"), framework]
    command += ["--from", str(questions), "--to", str(made), "--name", "sums", "--instruction", ""]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return made


def dry_run(framework: str, recipe: str, folder: Path, environment: Mapping[str, str], *options: str) -> set[str]:
    """The checks that fail in the dry run of a recipe, on endpoints that do not answer."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(RECIPES / framework / "run.sh"), recipe, "--dry-run", "--offline", *options],
        env={**environment, **ENDPOINTS, "PATH": path, "HOSTED_API_KEY": SECRET},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    return {line.partition("  ")[0].strip() for line in done.stdout.splitlines() if " FAIL " in line}
