"""`qreward ui`: it starts, says where, and says what is wrong."""

from __future__ import annotations

import re
import socket
import urllib.request

import pytest

from qreward_plugins.samples import Sample, Scored, Verdict

from ..kit import record, wait_until
from .conftest import reached, refusal


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


def test_a_report_is_one_file_that_loads_nothing(run_cli, tmp_path):
    evil = "</style><script>alert(1)</script>\x1b"
    samples = [Sample([], "r", step=number // 2, id=f"s{number}", data_source=evil) for number in range(6)]
    verdicts = [Verdict(number / 10, judge=evil, source=evil, rationale=evil) for number in range(6)]
    record(tmp_path / "journal.sqlite", zip(samples, map(Scored, verdicts), strict=True), run_id=evil)
    out = tmp_path / "report.html"
    result = run_cli("ui", tmp_path / "journal.sqlite", "--report", out)
    assert result.exit_code == 0, result.output
    text = out.read_text()
    assert '<td>2</td><td class="num">2</td><td class="num">0.45</td>' in text
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert text.count("<svg") == 4
    assert "<script" not in text
    assert "\x1b" not in text
    assert not re.search(r"(src|href)=[\"'](?!#)", text)
    other = run_cli("ui", tmp_path / "journal.sqlite", "--report", tmp_path / "journal.sqlite", "--overwrite")
    assert (other.exit_code, "must end in .html" in other.stderr) == (2, True)
    assert "exists; name another file" in refusal(run_cli("ui", tmp_path / "journal.sqlite", "--report", out))
    assert run_cli("ui", tmp_path / "journal.sqlite", "--report", out, "--overwrite").exit_code == 0


def test_what_cannot_be_opened(run_cli, journal, tmp_path):
    assert "there is no journal at" in refusal(run_cli("ui", tmp_path / "none.sqlite"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run_cli("ui", journal, "--port", taken.getsockname()[1])
    assert (result.exit_code, "choose another one with --port" in result.stderr) == (2, True)
