"""`qreward ui`: it starts, says where, and says what is wrong."""

from __future__ import annotations

import re
import signal
import socket
import urllib.request

import pytest

from qreward_plugins.journal import Journal


@pytest.fixture
def journal(tmp_path):
    Journal(tmp_path / "journal.sqlite").close()
    return tmp_path / "journal.sqlite"


def test_it_says_where_the_page_is_and_ends_with_a_signal(start_cli, journal):
    process = start_cli("ui", journal, "--port", "0")
    line = process.line("entries at")
    url = re.search(r"http://127\.0\.0\.1:\d+/", line)[0]
    with urllib.request.urlopen(url) as answer:
        assert b"No entries yet" in answer.read()
    assert process.end(signal.SIGINT)[0] == 130


def test_what_cannot_be_opened(run_cli, journal, tmp_path):
    result = run_cli("ui", tmp_path / "none.sqlite")
    assert (result.exit_code, "there is no journal at" in result.stderr) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run_cli("ui", journal, "--port", taken.getsockname()[1])
    assert (result.exit_code, "choose another one with --port" in result.stderr) == (2, True)
