"""`qreward ui`: it starts, says where, and says what is wrong."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from ..kit import record, wait_until
from .conftest import reached


@pytest.fixture
def journal(tmp_path):
    record(tmp_path / "journal.sqlite", [])
    return tmp_path / "journal.sqlite"


def test_it_says_where_the_page_is_and_ends_with_a_signal(stop_cli, journal, port):
    def look():
        wait_until(lambda: reached(port))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
            assert b"No entries yet" in answer.read()

    result = stop_cli(look, "ui", journal, "--port", port)
    assert (result.exit_code, f"0 entries at http://127.0.0.1:{port}/" in result.stdout) == (130, True)


def test_what_cannot_be_opened(run_cli, journal, tmp_path):
    result = run_cli("ui", tmp_path / "none.sqlite")
    assert (result.exit_code, "there is no journal at" in result.stderr) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run_cli("ui", journal, "--port", taken.getsockname()[1])
    assert (result.exit_code, "choose another one with --port" in result.stderr) == (2, True)
