"""The command itself: help, version, wrong words, streams that are closed or full, and where it may be started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import qreward_plugins
from qreward_plugins.cli.app import COMMANDS

from ..kit import each_of

CONFIG = "sources: {f: {kind: function, function: 'math:isclose', mode: thread}}\njudges: {j: {kind: function}}\n"
QREWARD = [sys.executable, "-m", "qreward_plugins.cli"]
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


def command(tmp_path, *arguments, **options):
    (tmp_path / "config.yaml").write_text(CONFIG)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([*QREWARD, *arguments], cwd=tmp_path, timeout=60, check=False, **streams)


def test_help_names_the_commands_and_imports_none_of_them():
    """Importing the engine takes a second."""
    program = "import sys; from qreward_plugins.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    *lines, modules = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in COMMANDS] == [*COMMANDS]
    loaded = modules.split()
    assert "qreward_plugins.cli.app" in loaded
    assert not {"pydantic", "aiohttp", "qreward_plugins.config", "qreward_plugins.engine"} & {*loaded}


def test_help_of_a_command_fits_a_terminal(run_cli):
    for name in COMMANDS:
        result = run_cli(name, "--help")
        assert (result.exit_code, f"Usage: qreward {name}" in result.stdout) == (0, True)
        assert max(map(len, result.stdout.splitlines())) <= 80


def test_no_command_shows_the_help_and_the_version_is_printed(run_cli):
    assert "fake-judge" in run_cli().output
    result = run_cli("--version")
    assert (result.exit_code, result.stdout) == (0, f"qreward-plugins {qreward_plugins.__version__}\n")


@each_of(
    ("arguments", "said"),
    [
        (["scoer"], "No such command 'scoer'. Did you mean 'score'"),
        (["score"], "Missing argument 'CONFIG'"),
        (["score", "config.yaml", "in.jsonl"], "Missing option '--out'"),
        (["check", "c.yaml", "--jounal"], "No such option: --jounal"),
    ],
)
def test_a_command_line_that_is_none(run_cli, arguments, said):
    result = run_cli(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Error: {said}" in result.stderr


def test_functions_of_the_working_directory_are_found(tmp_path, write_config):
    """Also by an installed command, which lives in another folder."""
    (tmp_path / "bin").mkdir()
    installed = tmp_path / "bin" / "qreward.py"
    installed.write_text("from qreward_plugins.cli import main\nmain()\n")
    (tmp_path / "my_rewards.py").write_text("def right(**_):\n    return 1.0\n")
    source = {"kind": "function", "function": "my_rewards:right", "workers": 1}
    config = write_config(sources={"f": source}, judges={"f": {"kind": "function"}})
    line = [sys.executable, installed, "check", config]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@FULL
def test_a_full_disk_is_one_message(tmp_path):
    with open("/dev/full", "wb") as full:
        done = command(tmp_path, "--help", stdout=full)
        both = command(tmp_path, "--help", stdout=full, stderr=full)
    assert (done.returncode, both.returncode) == (2, 2)
    assert done.stderr.splitlines()[-1] == b"error: the output cannot be written (No space left on device)"
    assert b"Traceback" not in done.stderr
    assert b"ignored" not in done.stderr


def test_a_reader_that_has_gone_is_no_error_of_ours(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = command(tmp_path, "check", "config.yaml", stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_characters_that_a_stream_lacks_are_escapes(tmp_path):
    (tmp_path / "\u4f60.yaml").write_text(CONFIG)
    done = command(tmp_path, "check", "--offline", "\u4f60.yaml", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert b"\\u4f60.yaml: valid" in done.stdout


def test_closed_streams_are_no_traceback(tmp_path):
    shell = ["sh", "-c", '"$@" <&- >&- 2>lost.txt', "sh", *QREWARD, "--help"]
    assert subprocess.run(shell, cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert (tmp_path / "lost.txt").read_text() == ""
