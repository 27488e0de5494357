"""The command itself: help, version, wrong words, streams that are closed or full, and where it may be started."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

import qreward_plugins
from qreward_plugins.cli import main as run_main
from qreward_plugins.cli.app import COMMANDS
from qreward_plugins.cli.console import OUT

CONFIG = "sources: {f: {kind: function, function: 'math:isclose', mode: thread}}\njudges: {j: {kind: function}}\n"


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


def test_no_command_shows_the_help_and_the_version_is_printed(run_cli):
    assert "fake-judge" in run_cli().output
    result = run_cli("--version")
    assert (result.exit_code, result.stdout) == (0, f"qreward-plugins {qreward_plugins.__version__}\n")


def test_a_wrong_word_of_an_option_is_told_without_the_words_of_a_library(run_cli):
    result = run_cli("init", "--framework", "nope")
    assert result.exit_code == 2
    assert "'nope' is not one of 'verl', 'slime'" in result.stderr
    assert "Value error" not in result.stderr


@pytest.fixture
def main(tmp_path, monkeypatch):
    """Run the command in this process as its program does, with a standard output of its own. Returns its exit code."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments, stdout=None, encoding="utf-8"):
        monkeypatch.setattr(sys, "argv", ["qreward", *arguments])
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stdout or io.BytesIO(), encoding))
        with pytest.raises(SystemExit) as ended:
            run_main()
        sys.stdout.close()
        return ended.value.code

    return run


def test_functions_of_the_working_directory_are_found(main, tmp_path, write_config):
    """Also by an installed command, which lives in another folder."""
    (tmp_path / "my_rewards.py").write_text("def right(**_):\n    return 1.0\n")
    source = {"kind": "function", "function": "my_rewards:right", "workers": 1}
    write_config(sources={"f": source}, judges={"f": {"kind": "function"}})
    assert main("check", "config.yaml") == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_one_message():
    line = [sys.executable, "-m", "qreward_plugins.cli", "--help"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == b"error: the output cannot be written (No space left on device)"
    assert b"Traceback" not in done.stderr


def test_a_reader_that_has_gone_is_no_error_of_ours(main, capfd, monkeypatch):
    monkeypatch.setattr(OUT, "quiet", False)  # rich sets it
    reader, writer = os.pipe()
    os.close(reader)
    assert main("check", "config.yaml", stdout=os.fdopen(writer, "wb")) == 1
    assert capfd.readouterr().err == ""


def test_characters_that_a_stream_lacks_are_escapes(main, tmp_path):
    (tmp_path / "config.yaml").rename(tmp_path / "\u4f60.yaml")
    kept = tmp_path / "out.txt"
    assert main("check", "--offline", "\u4f60.yaml", stdout=kept.open("wb"), encoding="ascii") == 0
    assert b"\\u4f60.yaml: valid" in kept.read_bytes()
