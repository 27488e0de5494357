"""Bad input of `qreward score`: one message, exit code 2, nothing asked, nothing written."""

from __future__ import annotations

import json
import sys

import pytest

GOOD = {"prompt": "q", "response": "r"}


@pytest.fixture
def refused(server, run_cli, write_config, tmp_path):
    """Run `qreward score`, and return the one line that it refuses with."""
    write_config({"a": server})

    def run(rows="in.jsonl", config="config.yaml", out="out.jsonl"):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        result = run_cli("score", tmp_path / config, tmp_path / rows, "-o", tmp_path / out)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1, result.stderr
        assert server.report().requests == 0
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        return result.stderr

    return run


BAD_LINES = {
    '{"prompt": "q", "response": "r"\n': "not valid JSON",
    '{"prompt": "q" "response": "r"}\n': "not valid JSON (Expecting ',' delimiter at column 16)",
    '{"prompt": "q", "respon\n': "not valid JSON (Unterminated string starting at column 17)",
    "[1]\n": "must be an object, not a list",
    '"text"\n': "must be an object, not a text",
    "null\n": "must be an object, not null",
    "{}\n": "needs a column response or solution_str or completion; it has no columns",
    '{"prompt": "q", "answer": "r"}\n': "needs a column response or solution_str or completion; it has prompt, answer",
    '{"prompt": "q", "\\u001b[31m": 1, "' + "x" * 9999 + '": 1}\n': "it has prompt, \\x1b[31m, xxx",
    '{"response": "r"}\n': "needs a column messages or prompt; it has response",
    '{"prompt": "q", "response": null}\n': "response is null",
    '{"prompt": "q", "response": 5}\n': "response must be a text, not a number",
    '{"prompt": "q", "response": ["r"]}\n': "response must be a text, not a list",
    '{"prompt": 5, "response": "r"}\n': "prompt must be a text or a list of messages, not a number",
    '{"prompt": true, "response": "r"}\n': "prompt must be a text or a list of messages, not true or false",
    '{"messages": [], "response": "r"}\n': "messages must be a text or a list of messages, not an empty list",
    '{"messages": ["q"], "response": "r"}\n': "messages[0] must be an object with role and content, not a text",
    '{"messages": [{"content": "q"}], "response": "r"}\n': "messages[0] needs a role",
    '{"messages": [{"role": "user"}], "response": "r"}\n': "messages[0] needs a content",
    '{"messages": [{"role": "user", "content": 5}], "response": "r"}\n': "messages[0] needs a content",
    '{"prompt": "q", "response": "r", "data_source": 5}\n': "data_source must be a text, not a number",
    '{"prompt": "q", "response": "r", "x": ' + "[" * 200_000 + "]" * 200_000 + "}\n": "nested too deeply",
    '{"prompt": "q", "response": "r", "x": ' + "9" * 5000 + "}\n": "an integer with thousands of digits",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_row_is_named_by_its_line(line, refused, write_rows):
    if "digits" in BAD_LINES[line] and not hasattr(sys, "get_int_max_str_digits"):
        pytest.skip("this Python reads integers of any length")
    write_rows([GOOD, GOOD, "\n", line, GOOD])
    message = refused()
    assert "in.jsonl, line 4: " in message
    assert BAD_LINES[line] in message
    assert len(message) < 500


@pytest.mark.parametrize("depth", [250, 260, 400, 600, 900, 1100])
def test_a_deep_row_is_scored_or_refused_but_never_lost(server, run_cli, write_config, write_rows, tmp_path, depth):
    """How deep Python can read and write differs between its versions."""
    line = '{"prompt": "q", "response": "r", "x": ' + "[" * depth + "]" * depth + "}\n"
    result = run_cli("score", write_config({"a": server}), write_rows([line]), "-o", tmp_path / "out.jsonl")
    if result.exit_code == 0:
        assert "[" * depth + "]" * depth in (tmp_path / "out.jsonl").read_text()
    else:
        assert (result.exit_code, server.report().requests) == (2, 0)
        assert "nested too deeply" in result.stderr


def test_bytes_that_are_no_utf8_are_named(refused, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff"}\n')
    assert "line 2: not valid JSON (byte 13 is not UTF-8)" in refused()


def test_a_byte_order_mark_is_no_mistake(server, run_cli, write_config, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    result = run_cli("score", write_config({"a": server}), tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 0


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_a_file_without_rows(refused, write_rows, content):
    write_rows([content])
    assert "in.jsonl: has no rows" in refused()


def test_paths_that_lead_nowhere(refused, write_rows, tmp_path):
    write_rows([GOOD])
    (tmp_path / "folder.jsonl").mkdir()
    assert "missing.jsonl: cannot be read (No such file or directory)" in refused(rows="missing.jsonl")
    assert "folder.jsonl: cannot be read (Is a directory)" in refused(rows="folder.jsonl")
    assert "out.jsonl: there is no directory" in refused(out="no/such/out.jsonl")
    assert "folder.jsonl: is a directory" in refused(out="folder.jsonl")
    assert "missing.yaml: there is no such file" in refused(config="missing.yaml")


def test_names_that_promise_another_format(refused, write_rows):
    write_rows([GOOD])
    write_rows([GOOD], name="in.csv")
    assert "in.csv: the name must end in .jsonl or .parquet" in refused(rows="in.csv")
    assert "out.txt: the name must end in .jsonl or .parquet" in refused(out="out.txt")
    assert "parquet output needs parquet input" in refused(out="out.parquet")


def test_the_input_is_not_overwritten(refused, write_rows, tmp_path):
    write_rows([GOOD])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    assert "is the input itself" in refused(out="in.jsonl")
    assert "is the input itself" in refused(out="link.jsonl")


def test_a_parquet_file_that_is_none(refused, tmp_path):
    (tmp_path / "in.parquet").write_bytes(b"PAR1 or not")
    assert "in.parquet: not a readable parquet file" in refused(rows="in.parquet")


def test_a_parquet_row_is_named_by_its_number(refused, tmp_path):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"prompt": ["q"] * 100, "response": ["r"] * 99 + [None]})
    parquet.write_table(table, tmp_path / "in.parquet")
    assert "in.parquet, row 100: response is null" in refused(rows="in.parquet", out="out.parquet")
    parquet.write_table(table.slice(0, 0), tmp_path / "in.parquet")
    assert "in.parquet: has no rows" in refused(rows="in.parquet")


def test_parquet_without_pyarrow(refused, tmp_path, monkeypatch):
    (tmp_path / "in.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'qreward-plugins[parquet]'" in refused(rows="in.parquet")


def test_one_mistake_of_the_configuration_is_one_line(refused, write_rows, write_config, tmp_path):
    write_rows([GOOD])
    write_config({"a": "http://127.0.0.1:9/v1"}, source={"limits": {"concurency": 3}})
    message = refused()
    assert "config.yaml: sources.a.limits.concurency: " in message
    assert "concurrency" in message
    write_config({"a": "http://127.0.0.1:9/v1"}, judge={"instructions": "{{ nonsense }}"})
    assert "config.yaml: judges.quality.instructions: " in refused()


def test_all_mistakes_of_the_configuration_are_told_at_once(run_cli, write_rows, write_config, tmp_path):
    config = write_config({"a": "ftp://x"}, judge={"score_range": [1, 0]}, routes={"*": "qality"})
    result = run_cli("score", config, write_rows([GOOD]), "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: 3 mistakes in ")
    for path in ("sources.a.base_url", "judges.quality.score_range", "routes"):
        assert f"  - {path}" in result.stderr


def test_what_looks_like_markup_is_printed_as_it_is(refused, write_rows):
    write_rows([GOOD], name="[red]:warning:.txt")
    assert "[red]:warning:.txt: the name must end" in refused(rows="[red]:warning:.txt")


def test_a_file_that_changes_under_the_run_is_told(server, run_cli, write_config, write_rows, tmp_path, monkeypatch):
    path = write_rows([GOOD, GOOD])
    from qreward_plugins.cli import score

    checked = score.check_rollouts

    def check_and_spoil(*args, **kwargs):
        total = checked(*args, **kwargs)
        write_rows([GOOD, "{"])
        return total

    monkeypatch.setattr(score, "check_rollouts", check_and_spoil)
    result = run_cli("score", write_config({"a": server}), path, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "in.jsonl, line 2: not valid JSON" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()
