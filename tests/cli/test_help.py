"""Help, version, and the two ways to start the command."""

from __future__ import annotations

import subprocess
import sys

import pytest

import qreward_plugins


def test_help_names_the_commands(run_cli):
    result = run_cli("--help")
    assert result.exit_code == 0
    for command in ("check", "score", "calibrate", "plan", "fake-judge", "journal", "kinds"):
        line = next(line for line in result.stdout.splitlines() if line.strip().startswith(command))
        assert line.endswith(".")
        assert "..." not in line


@pytest.mark.parametrize("command", ["check", "score", "calibrate", "plan", "fake-judge", "journal", "kinds"])
def test_help_of_a_command_fits_a_terminal(run_cli, command):
    result = run_cli(command, "--help")
    assert result.exit_code == 0
    assert f"Usage: qreward {command}" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_no_command_shows_the_help(run_cli):
    assert "fake-judge" in run_cli().output


@pytest.mark.parametrize("arguments", [["scoer"], ["score"], ["score", "in.jsonl"], ["check", "c.yaml", "--jounal"]])
def test_a_command_line_that_is_none(run_cli, arguments):
    result = run_cli(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr


def test_the_version(run_cli):
    result = run_cli("--version")
    assert (result.exit_code, result.stdout) == (0, f"qreward-plugins {qreward_plugins.__version__}\n")


def test_the_module_is_the_command(tmp_path):
    command = [sys.executable, "-m", "qreward_plugins.cli", "check", "missing.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: missing.yaml: there is no such file")


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback():
    program = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'qreward_plugins.engine':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from qreward_plugins.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_functions_of_the_working_directory_are_found(tmp_path, write_config):
    """Also by an installed command, which lives in another folder."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "qreward.py"
    command.write_text("from qreward_plugins.cli import main\nmain()\n")
    (tmp_path / "my_rewards.py").write_text("def right(**_):\n    return 1.0\n")
    config = write_config(
        sources={"f": {"kind": "function", "function": "my_rewards:right", "workers": 1}},
        judges={"f": {"kind": "function"}},
    )
    done = subprocess.run(
        [sys.executable, command, "check", config], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
