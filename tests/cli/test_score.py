"""`qreward score`: all rows in order, exit codes and reasons, what a second run pays, and input that is refused."""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import sqlite3
import sys
from contextlib import suppress

import pytest
import yaml

from qreward_plugins.errors import InputError
from qreward_plugins.files import open_writer, read_rollouts
from qreward_plugins.testing import JudgeServer

from ..kit import each_of

KEYS = {
    "steps", "dense",
    "reward", "outcome", "cause", "reason", "detail", "components", "correct", "rationale", "judge", "source", "model",
    "weight_version",
    "attempts", "prompt_tokens", "completion_tokens", "latency_s", "cost_usd", "cached", "cut",
}  # fmt: skip
GOOD = {"prompt": "q", "response": "r"}


@pytest.fixture
def score(run_cli, server, write_config, write_rows, tmp_path):
    """Run `qreward score` on rows, or on in.jsonl as it is, with one judge over `server`, to out.jsonl."""
    write_config({"a": server})

    def run(rows=None, *, config="config.yaml", source="in.jsonl", out="out.jsonl", overwrite=True):
        if rows is not None:
            write_rows(rows)
        options = ["--overwrite"] if overwrite else []
        return run_cli("score", tmp_path / config, tmp_path / source, "--out", tmp_path / out, *options)

    return run


@pytest.fixture
def scored(read_rows, tmp_path):
    """The outcomes of a file."""
    return lambda name="out.jsonl": [line["qreward"] for line in read_rows(tmp_path / name)]


def function_config(tmp_path, write_config, body, **source):
    (tmp_path / "functions.py").write_text(body)
    source = {"kind": "function", "function": f"{tmp_path}/functions.py:f", "mode": "thread", **source}
    write_config(sources={"f": source}, judges={"f": {"kind": "function"}})


def test_a_function_that_workers_cannot_load_is_one_error(run_cli, tmp_path, write_config, write_rows, row):
    function_config(tmp_path, write_config, "", mode="process", devices=[0])
    rows = write_rows([row(n) for n in range(40)])
    result = run_cli("score", tmp_path / "config.yaml", rows, "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    (error,) = (line for line in result.stderr.splitlines() if "functions.py" in line)
    assert error.startswith(f"error: {tmp_path / 'config.yaml'}: sources.f.function: ")


def test_what_several_judges_said_is_one_line(server, run_cli, write_rows, row, tmp_path):
    source = {"kind": "openai", "base_url": server.base_url, "model": "judge"}
    leaves = {name: {"kind": "llm", "score_range": [0, 1], "instructions": name} for name in ("first", "second")}
    judges = {**leaves, "both": {"kind": "panel", "judges": ["first", "second"]}}
    config = tmp_path / "both.yaml"
    config.write_text(json.dumps({"sources": {"a": source}, "judges": judges, "routes": {"*": "both"}}))
    result = run_cli("score", config, write_rows([row(0)]), "--out", tmp_path / "out.jsonl")
    assert "first: scored by the judge server; second: scored by the judge server" in result.stdout


def test_rows_come_out_in_order_with_their_outcome(server, score, read_rows, row, tmp_path):
    rows = [row(n, response=f"It is {n + n % 2:03}.", extra={"nested": [n, None]}) for n in range(60)]
    result = score(rows)
    assert result.exit_code == 0, result.output
    lines = read_rows(tmp_path / "out.jsonl")
    outcomes = [line.pop("qreward") for line in lines]
    assert lines == rows
    assert [outcome["reward"] for outcome in outcomes] == [float(n % 2) for n in range(60)]
    assert all(set(outcome) == KEYS for outcome in outcomes)
    first = outcomes[0]
    assert (first["judge"], first["source"], first["model"], first["attempts"]) == ("quality", "a", "judge", 1)
    assert first["prompt_tokens"] > 0
    assert server.report().requests == 60
    assert "60 of 60 rows have a reward, mean reward 0.5" in result.stdout
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_rows_of_a_group_that_follow_each_other_are_compared(run_cli, scored, write_config, write_rows, row, tmp_path):
    groups = {"a": ("0.2", "0.9", "0.5"), "b": ("0.7", "0.1")}
    rows = [
        {**row(n), "response": worth, "group_id": name}
        for n, (name, worths) in enumerate(groups.items())
        for worth in worths
    ]
    with JudgeServer(lambda call: float(call.blocks["response"])) as server:
        config = write_config({"a": server})
        rank = {"kind": "rank", "judge": "quality"}
        config.write_text(config.read_text().replace("judges:\n", f"judges:\n  ranks: {json.dumps(rank)}\n"))
        result = run_cli("score", config, write_rows(rows), "--out", tmp_path / "out.jsonl")
        assert (result.exit_code, server.report().requests) == (0, 2), result.output
    assert [each["reward"] for each in scored()] == [0.0, 1.0, 0.5, 1.0, 0.0]
    result = run_cli("score", config, write_rows([*rows, rows[0]]), "--out", tmp_path / "mixed.jsonl")
    assert (result.exit_code, "row 6: the group 'a' goes on behind rows of other" in result.stderr) == (2, True)


def test_a_list_in_a_json_file_is_scored_to_lines(score, read_rows, row, write_rows, tmp_path):
    write_rows([json.dumps([row(1), row(2, response="It is 7.")])], name="in.json")
    assert score(source="in.json").exit_code == 0
    assert [line["qreward"]["reward"] for line in read_rows(tmp_path / "out.jsonl")] == [1.0, 0.0]


def test_it_ends_with_the_rewards_of_each_data_source_and_the_lowest(server, score, row, run_cli, tmp_path):
    rows = [
        row(n, response=f"It is {n + n % 2:03}.", data_source="odd" if n % 4 else "even \x1b[1m") for n in range(40)
    ]
    rows[8]["response"] = "It is BAD"
    result = score(rows)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert next(line for line in lines if line[:1] == ["odd"])[:7] == ["odd", "30", "0", "0.667", "0", "1", "1"]
    assert next(line for line in lines if line[:1] == ["even"])[2:7] == ["10", "1", "0", "0", "0"]
    lowest = result.stdout.partition("lowest:\n")[2].splitlines()[:5]
    assert [line.split()[:3] for line in lowest] == [["0", "line", str(n)] for n in (1, 3, 5, 7, 11)]
    assert "\x1b" not in result.stdout
    (command,) = (line for line in result.stdout.splitlines() if "qreward why" in line)
    told = run_cli(*shlex.split(command.partition("qreward ")[2]))
    assert told.exit_code == 0
    assert " · sample line 1 · " in told.stdout
    assert " · reward 0 " in told.stdout


def test_failed_rows_keep_their_place_and_only_they_are_tried_again(server, score, scored, row):
    result = score([row(n, response=f"It is {n + 1:03}." + (" BAD" if n in (3, 17) else "")) for n in range(20)])
    assert result.exit_code == 3
    assert "18 of 20 rows have a reward" in result.stdout
    assert "2 without a reward (verdict/invalid): " in result.stderr
    assert [n for n, outcome in enumerate(scored()) if outcome["reward"] is None] == [3, 17]
    failed = scored()[3]
    assert (failed["outcome"], failed["cause"], failed["reason"]) == ("failed", "verdict", "invalid")
    assert failed["detail"]
    assert set(failed) == KEYS
    assert score().exit_code == 3
    assert server.report().requests == 22

    port = server.port
    server.stop()
    with JudgeServer(lambda call: 0.25, port=port) as mended:
        result = score()
        assert mended.report().requests == 2
    assert result.exit_code == 0
    assert "20 of 20 rows have a reward (18 of them from the journal)" in result.stdout
    assert [one["reward"] for one in scored()] == [0.25 if n in (3, 17) else 1.0 for n in range(20)]
    assert [one["cached"] for one in scored()] == [n not in (3, 17) for n in range(20)]


def test_every_reason_is_told_with_its_number_and_a_floor_is_a_reward(score, scored, row, server, write_config):
    write_config({"a": server}, judge={"reward_range": [-1, 1]}, routes={"math/*": "quality"})
    sources, responses = ["math/x", "code/x", "code/y", "math/x", "math/x"], ["001", "001", "001", "BAD", "  "]
    rows = [
        row(n, data_source=one, response=said) for n, (one, said) in enumerate(zip(sources, responses, strict=True))
    ]
    result = score(rows)
    assert result.exit_code == 3
    told = [line for line in result.stderr.splitlines() if "without a reward" in line or "floor" in line]
    assert [line.partition(":")[0] for line in told] == [
        "2 without a reward (infra/no_route)",
        "1 without a reward (verdict/invalid)",
        "1 scored at the floor (policy/empty)",
    ]
    assert "'code/x'" in told[0]
    assert (scored()[4]["reward"], scored()[4]["cause"]) == (-1.0, "policy")


def test_the_journal_of_the_configuration_is_used_and_read(server, score, write_config, verdicts_in, row, tmp_path):
    journal = tmp_path / "verdicts.sqlite"
    write_config({"a": server}, engine={"journal": {"path": str(journal), "reuse": False}})
    assert score([row(n) for n in range(5)]).exit_code == 0
    assert (verdicts_in(journal), (tmp_path / "out.jsonl.journal").exists()) == (5, False)
    assert score(out="another.jsonl").exit_code == 0
    assert server.report().requests == 5
    write_config({"a": server}, engine={"journal": {"path": str(tmp_path / "in.jsonl")}})
    result = score()
    assert (result.exit_code, server.report().requests) == (2, 5)
    assert "is not a journal" in result.stderr


def test_an_output_can_be_scored_again(score, read_rows, row, tmp_path):
    score([row(n) for n in range(3)])
    assert score(source="out.jsonl", out="again.jsonl").exit_code == 0
    assert [list(line) for line in read_rows(tmp_path / "again.jsonl")] == [[*row(0), "qreward"]] * 3


def test_a_sample_has_its_line_its_step_and_its_group(score, row, tmp_path, write_config):
    rows = [row(0, step=3, group_id="g"), "\n", row(1, step=4, group_id=7), row(2, step="three", id="mine")]
    assert score(rows).exit_code == 0
    connection = sqlite3.connect(tmp_path / "out.jsonl.journal")
    names = set(connection.execute("SELECT sample_id, step, group_id FROM outcomes"))
    connection.close()
    assert names == {("line 1", 3, "g"), ("line 3", 4, "7"), ("mine", None, None)}


ODD_ROWS = [
    '{"prompt": "half a pair \\ud83d", "response": "001 \\udc00", "ground_truth": "001", "odd": "\\ud800"}\n',
    '{"prompt": "NaN", "response": "001", "ground_truth": "001", "odd": [NaN, -Infinity, {"x": Infinity}]}\n',
    '{"prompt": "long", "response": "001", "ground_truth": "001", "odd": 123456789012345678901234567890}\n',
    '{"prompt": "deep", "response": "001", "ground_truth": "001", "odd": ' + "[" * 300 + "]" * 300 + "}\n",
    json.dumps({"prompt": "huge", "response": "001" + "x" * 3_000_000, "ground_truth": "001"}) + "\n",
    json.dumps({"prompt": "own", "response": "001", "ground_truth": "001", "qreward": {"reward": 9}, "id": 7}) + "\n",
    json.dumps({"prompt": "two", "messages": None, "response": "001", "completion": "9", "ground_truth": "001"}) + "\n",
    '{"prompt": "\\u00e9\U0001f600\u2028", "response": "001", "ground_truth": "001"}\r\n',
    "\n",
    '{"prompt": "last", "response": "001", "ground_truth": "001"}',
]


def test_odd_rows_are_neither_lost_nor_changed(score, read_rows, tmp_path):
    assert score(ODD_ROWS).exit_code == 0
    lines = read_rows(tmp_path / "out.jsonl")
    assert [line.pop("qreward")["reward"] for line in lines] == [1.0] * 9
    given = [json.loads(line, parse_constant=lambda _: None) for line in ODD_ROWS if line.strip()]
    assert lines == [{name: value for name, value in line.items() if name != "qreward"} for line in given]
    for line in (tmp_path / "out.jsonl").read_bytes().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_functions_get_the_columns_and_their_words_are_written_as_they_can_be(
    score, scored, row, tmp_path, write_config
):
    body = (
        "def f(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str), 'n': extra_info['number'], 'in': extra_info['key'], '\\ud800': 1}\n"
    )
    function_config(tmp_path, write_config, body, mode="process", workers=1)
    assert score([row(n, key="outer", extra_info={"key": n}) for n in range(3)]).exit_code == 0
    assert [one["reward"] for one in scored()] == [10.0] * 3
    # `extra_info` wins over a column of the same name, as it is what the function sees in training.
    assert [one["components"] for one in scored()] == [{"n": n, "in": n, "?": 1.0} for n in range(3)]


def test_a_sum_is_one_row_with_its_parts(server, score, scored, write_config, row, tmp_path, verdicts_in):
    judges = {
        "quality": {"kind": "llm", "score_range": [0, 1], "invalid_retries": 0, "criteria": {"proof": "Proven?"}},
        "rules": {"kind": "function"},
    }
    sources = {
        "a": {"kind": "openai", "base_url": server.base_url, "model": "judge"},
        "rm": {"kind": "http", "url": server.score_url, "model": "rm"},
    }
    rows = [row(1), row(2, response="It is 7."), row(3, response="BAD")]
    for weights, requests in (({"quality": 1, "rules": 1}, 6), ({"quality": 1, "rules": -3}, 8)):
        judges["total"] = {"kind": "sum", "weights": weights}
        write_config(sources=sources, judges=judges, on_failure="exclude")
        result = score(rows)
        assert result.exit_code == 3, result.output
        right, wrong, bad = scored()
        # The row without a reward is tried again, the others are known part by part.
        assert server.report().requests <= requests
        assert (right["reward"], wrong["reward"], bad["reward"]) == (sum(weights.values()), 0.0, None)
        assert right["components"] == {"quality": 1.0, "quality/proof": 1.0, "rules": 1.0}
        assert (right["judge"], right["source"], right["model"]) == ("total", "a+rm", "judge+rm")
        assert (bad["cause"], bad["reason"], bad["components"]) == ("verdict", "invalid", {})
    assert right["cached"]
    assert verdicts_in(tmp_path / "out.jsonl.journal") == 4


def test_what_exists_is_replaced_only_when_it_is_said(score, server, row, tmp_path):
    (tmp_path / "out.jsonl").write_text("precious")
    result = score([row(1)], overwrite=False)
    assert (result.exit_code, (tmp_path / "out.jsonl").read_text()) == (2, "precious")
    assert "out.jsonl: exists" in result.output.replace("\n", "")
    result = score([row(1), row(2, qreward="precious")], out="b.jsonl", overwrite=False)
    assert result.exit_code == 2
    assert "row 2: has a column 'qreward'" in result.output.replace("\n", "")
    assert server.report().requests == 0
    assert score().exit_code == 0
    assert "reward" in (tmp_path / "out.jsonl").read_text()


def test_one_run_at_a_time_writes_an_out_and_an_earlier_one_stays_until_it_is_whole(
    server, score, write_rows, row, tmp_path
):
    source, out = write_rows([row(0)]), tmp_path / "out.jsonl"
    out.write_text("earlier")
    with suppress(ZeroDivisionError), open_writer(out, source=source):
        result = score()
        raise ZeroDivisionError
    assert out.read_text() == "earlier"
    assert (result.exit_code, server.report().requests) == (2, 0)
    assert "another run is writing it" in result.stderr
    assert "stopped after" not in result.stderr, "what the other run has written is not this one's to tell of"
    assert score().exit_code == 0


def test_a_disk_that_is_full_is_one_message_and_the_run_can_go_on(server, score, row, monkeypatch):
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device")
        patch.setattr("qreward_plugins.files.tables.as_json", lambda _: (_ for _ in ()).throw(full))
        result = score([row(n) for n in range(3)])
    assert result.exit_code == 2
    assert "out.jsonl.partial: cannot be written (No space left on device)" in result.stderr
    assert "Run the same command again" in result.stderr
    paid = server.report().requests
    assert score().exit_code == 0
    assert server.report().requests <= 3 + paid


@pytest.fixture
def refused(server, score, tmp_path):
    """Run `qreward score`, and return the one line that it refuses with: nothing is asked, and nothing written."""

    def run(**options):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        result = score(overwrite=False, **options)
        assert (result.exit_code, result.stdout, server.report().requests) == (2, "", 0), result.output
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1, result.stderr
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        return result.stderr

    return run


BAD_LINES = {
    '{"prompt": "q" "response": "r"}\n': "not valid JSON (Expecting ',' delimiter at column 16)",
    '{"prompt": "q", "respon\n': "not valid JSON (Unterminated string starting at column 17)",
    "[1]\n": "must be an object, not a list",
    "{}\n": "needs a column response or solution_str or completion; it has no columns",
    '{"prompt": "q", "\\u001b[31m": 1, "' + "x" * 9999 + '": 1}\n': "it has prompt, \\x1b[31m, xxx",
    '{"response": "r"}\n': "needs a column messages or prompt; it has response",
    '{"prompt": "q", "response": null}\n': "response is null",
    '{"prompt": "q", "response": ["r"]}\n': "response must be a text, not a list",
    '{"prompt": true, "response": "r"}\n': "prompt must be a text or a list of messages, not true or false",
    '{"messages": [], "response": "r"}\n': "messages must be a text or a list of messages, not an empty list",
    '{"messages": ["q"], "response": "r"}\n': "messages[0] must be an object with role and content, not a text",
    '{"messages": [{"role": "user"}], "response": "r"}\n': "messages[0] needs a content",
    '{"prompt": "q", "response": "r", "data_source": 5}\n': "data_source must be a text, not a number",
    '{"prompt": "q", "response": "r", "images": "a.png"}\n': "images must be a list of images, not a text",
    '{"prompt": "q", "response": "r", "x": ' + "[" * 200_000 + "]" * 200_000 + "}\n": "nested too deeply",
    '{"prompt": "q", "response": "r", "x": ' + "9" * 5000 + "}\n": "an integer with thousands of digits",
}


@each_of("line", BAD_LINES)
def test_a_bad_row_is_named_by_its_line(line, refused, write_rows):
    if "digits" in BAD_LINES[line] and not hasattr(sys, "get_int_max_str_digits"):
        return
    write_rows([GOOD, GOOD, "\n", line, GOOD])
    message = refused()
    assert "in.jsonl, line 4: " in message
    assert BAD_LINES[line] in message
    assert len(message) < 500


def test_files_that_cannot_be_are_named(refused, score, write_rows, tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "bytes.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff"}\n')
    (tmp_path / "none.parquet").write_bytes(b"PAR1 or not")
    os.mkfifo(tmp_path / "pipe.jsonl")
    write_rows(["\n  \n"], name="empty.jsonl")
    write_rows([GOOD], name="[red]:warning:.txt")
    write_rows([GOOD])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    for options, said in (
        ({"source": "missing.jsonl"}, "missing.jsonl: cannot be read (No such file or directory)"),
        ({"source": "folder.jsonl"}, "folder.jsonl: cannot be read (Is a directory)"),
        ({"source": "bytes.jsonl"}, "line 2: not valid JSON (byte 13 is not UTF-8)"),
        ({"source": "none.parquet"}, "none.parquet: not a readable parquet file"),
        ({"source": "pipe.jsonl"}, "pipe.jsonl: is no file (a pipe, for example), and rows are read twice"),
        ({"source": "empty.jsonl"}, "empty.jsonl: has no rows"),
        ({"source": "[red]:warning:.txt"}, "[red]:warning:.txt: the name must end in .jsonl, .json or .parquet"),
        ({"out": "no/such/out.jsonl"}, "out.jsonl: there is no directory"),
        ({"out": "folder.jsonl"}, "folder.jsonl: is a directory"),
        ({"out": "out.txt"}, "out.txt: the name must end in .jsonl or .parquet"),
        ({"out": "out.parquet"}, "parquet output needs parquet input"),
        ({"source": "list.json", "out": "out.parquet"}, "parquet output needs parquet input"),
        ({"out": "in.jsonl"}, "is the input itself"),
        ({"out": "link.jsonl"}, "is the input itself"),
        ({"config": "missing.yaml"}, "missing.yaml: there is no such file"),
    ):
        assert said in refused(**options)
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())  # a byte order mark is no mistake
    assert score().exit_code == 0


def test_mistakes_of_the_configuration_are_told_at_once(refused, score, write_rows, write_config):
    write_rows([GOOD])
    write_config({"a": "http://127.0.0.1:9/v1"}, source={"limits": {"concurency": 3}})
    assert "config.yaml: sources.a.limits.concurency (line 7): " in refused()
    write_config({"a": "ftp://x"}, judge={"score_range": [1, 0]}, routes={"*": "qality"})
    result = score()
    assert (result.exit_code, result.stderr.startswith("error: 3 mistakes in ")) == (2, True)


def test_images_are_paths_below_the_folder_or_data_urls(server, score, scored, read_rows, write_config, tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pillow.new("RGB", (8, 6), "red").save(target := io.BytesIO(), format="PNG")
    (tmp_path / "pictures").mkdir()
    for path in (tmp_path / "pictures" / "a.png", tmp_path.parent / "outside.png"):
        path.write_bytes(target.getvalue())
    url = "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()
    path = {"type": "image", "image": "pictures/a.png"}
    rows = [
        {"prompt": "<image>What?", "images": ["pictures/a.png"], "response": "5", "response_images": [url]},
        {"messages": [{"role": "user", "content": [path, {"type": "text", "text": "What?"}]}], "response": "5"},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], "response": "5"},
        {"prompt": "What?", "response": "5"},
        {"prompt": "What?", "images": ["../outside.png"], "response": "5"},
        {"prompt": "What?", "images": ["http://127.0.0.1:9/a.png"], "response": "5"},
        {"prompt": "What?", "images": [f"{url}AA"], "response": "5"},
        {"prompt": "What?", "images": ["pictures/none.png"], "response": "5"},
    ]
    assert score(rows).exit_code == 0  # a judge that sees no images is not bothered by them
    config = write_config({"a": server})
    tree = yaml.safe_load(config.read_text())
    tree["sources"]["a"]["vision"] = True
    config.write_text(yaml.safe_dump(tree))
    assert score(rows).exit_code == 3
    assert [one["outcome"] for one in scored()] == ["scored"] * 4 + ["failed"] * 4
    assert "is a path" in scored()[4]["detail"]
    assert "images are not fetched" in scored()[5]["detail"]
    written = [line for line in read_rows(tmp_path / "out.jsonl") if "images" in line]
    assert [line["images"] for line in written] == [line["images"] for line in rows if "images" in line]
    assert "images" not in next(read_rollouts(tmp_path / "in.jsonl")).sample.extras


def test_turns_are_a_response_and_other_columns_of_this_name_are_not(tmp_path, write_rows):
    said = [{"role": "assistant", "content": "I look", "tool_calls": [{"function": {"name": "look"}}]}]
    said += [{"role": "tool", "content": [{"text": "42"}]}, {"role": "assistant", "content": "It is 42"}]
    whole = {"prompt": "q", "response": "ab", "turns": [{"role": "assistant", "content": "ab", "end": 2}]}
    rows = [
        {"prompt": "q", "turns": said},
        {"prompt": "q", "response": None, "turns": said[2:]},
        whole,
        {**GOOD, "turns": ["q2"]},
    ]
    several, single, given, other = (rollout.sample for rollout in read_rollouts(write_rows(rows)))
    call = '[tool calls] [{"function":{"name":"look"}}]'
    assert several.response == f"assistant: I look\n{call}\n\ntool: 42\n\nassistant: It is 42"
    assert [several.response[: turn["end"]].split("\n\n")[-1] for turn in several.turns] == several.response.split(
        "\n\n"
    )
    assert [turn["content"] for turn in several.turns] == [f"I look\n{call}", "42", "It is 42"]
    assert (single.response, single.turns) == ("It is 42", ())
    assert list(given.turns) == whole["turns"]
    assert (other.turns, other.extras) == ((), {"turns": ["q2"]})


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        ("I look", "turns must be a list of messages, not a text"),
        ([{"content": "I look"}], r"turns\[0\] needs a role"),
        ([{"role": "tool", "content": "42"}], "turns has no message of the role assistant"),
    ],
)
def test_turns_of_a_wrong_form_are_named(tmp_path, write_rows, turns, problem):
    with pytest.raises(InputError, match=problem):
        list(read_rollouts(write_rows([{"prompt": "q", "turns": turns}])))
