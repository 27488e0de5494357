"""Why these tests do not run, where they do not: one reason, with the remedy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from . import real


def checkout(folder):
    path = folder / "roll" / "pipeline" / "rlvr" / "rlvr_pipeline.py"
    path.parent.mkdir(parents=True)
    path.touch()
    return {"QREWARD_ROLL_SRC": str(folder)}


def test_without_a_checkout_the_variable_is_named():
    assert "QREWARD_ROLL_SRC is not set" in real.why_not({})
    assert "environment.sh" in real.why_not({})


def test_a_folder_that_is_no_checkout_is_named(tmp_path):
    reason = real.why_not({"QREWARD_ROLL_SRC": str(tmp_path)})
    assert str(tmp_path) in reason
    assert "is not a checkout of ROLL" in reason


def test_packages_that_do_not_fit_are_named_with_the_remedy(tmp_path, monkeypatch):
    class Metadata:
        PackageNotFoundError = real.metadata.PackageNotFoundError

        @staticmethod
        def version(name):
            if name == "ray":
                raise Metadata.PackageNotFoundError(name)
            return "2.4.6"

    monkeypatch.setattr(real, "metadata", Metadata)
    reason = real.why_not(checkout(tmp_path))
    assert "numpy<2,>=1.25 is 2.4.6" in reason
    assert "ray==2.48.0 is not there" in reason
    assert "environment.sh" in reason


def test_the_script_installs_with_uv_once(tmp_path):
    log, programs, folder = tmp_path / "log", tmp_path / "programs", tmp_path / "venv"
    for path in (programs / "uv", folder / "bin" / "python"):
        path.parent.mkdir(parents=True)
        path.write_text(f'#!/bin/sh\necho "{path.name} $*" >> "{log}"\n')
        path.chmod(0o755)
    environment = {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHON": sys.executable,
        "ROLL_VENV": str(folder),
        **checkout(tmp_path / "roll"),
    }
    bash = shutil.which("bash") or "bash"
    for run in (1, 2):
        command = [bash, str(real.HERE / "environment.sh"), "-k", "worker"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        calls = log.read_text().splitlines()
        assert calls[-1] == "python -m pytest tests/conformance/roll -k worker"
        installed = [call.split("unsafe-best-match ")[1] for call in calls if call.startswith("uv pip install")]
        assert len(installed) == 3, f"run {run}"
    torch, packages, gem = installed
    assert torch.startswith("torch==")
    assert packages == f"--requirement {real.HERE}/requirements.txt --editable {real.PROJECT}"
    assert gem == "--no-deps gem-llm==0.0.4"
