"""Output that nobody can take: a full disk, a reader that has gone. One message, an exit code, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CONFIG = "sources: {f: {kind: function, function: 'math:isclose', mode: thread}}\njudges: {j: {kind: function}}\n"


def command(tmp_path, *arguments, **streams):
    (tmp_path / "config.yaml").write_text(CONFIG)
    return subprocess.run(
        [sys.executable, "-m", "qreward_plugins.cli", *arguments],
        cwd=tmp_path,
        timeout=60,
        check=False,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [["check", "config.yaml"], ["--help"], ["--version"]])
def test_a_full_disk_is_one_message(arguments, tmp_path):
    with open("/dev/full", "wb") as full:
        done = command(tmp_path, *arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr.decode().strip().splitlines()[-1:] == [
        "error: the output cannot be written (No space left on device)"
    ]
    assert b"Traceback" not in done.stderr
    assert b"ignored" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_messages_that_cannot_be_written_end_it_quietly(tmp_path):
    with open("/dev/full", "wb") as full:
        done = command(tmp_path, "check", "no-such.yaml", stdout=full, stderr=full)
    assert done.returncode == 2


def test_closed_streams_are_no_traceback(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    program = [sys.executable, "-m", "qreward_plugins.cli", "check", "config.yaml", "--offline"]
    shell = ["sh", "-c", '"$@" <&- >&- 2>lost.txt', "sh", *program]
    assert subprocess.run(shell, cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert (tmp_path / "lost.txt").read_text() == ""


def test_a_reader_that_has_gone_is_no_error_of_ours(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = command(tmp_path, "check", "config.yaml", stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert done.stderr == b""
    assert done.stderr == b""


def test_characters_that_a_stream_lacks_are_escapes(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "\u4f60.yaml").write_text(CONFIG)
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = command(tmp_path, "check", "--offline", "\u4f60.yaml", env=ascii_only)
    assert done.returncode == 0, done.stderr
    assert b"\\u4f60.yaml: valid" in done.stdout
