"""`qreward score`: all rows in order, exit codes and reasons, what a second run pays, and input that is refused."""

from __future__ import annotations

import base64
import datetime
import io
import json
import os
import shlex
import sys
from contextlib import suppress
from decimal import Decimal

import pyarrow as pa
import pytest
from pyarrow import parquet

from qreward_plugins.files import open_writer, read_rollouts
from qreward_plugins.testing import JudgeServer

from ..kit import each_of, sql
from .conftest import exited, refusal

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


def test_rows_come_out_in_order_with_their_outcome(server, score, read_rows, row, tmp_path):
    rows = [row(n, response=f"It is {n + n % 2:03}.", extra={"nested": [n, None]}) for n in range(60)]
    result = exited(score(rows))
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
    told = refusal(run_cli("score", config, write_rows([*rows, rows[0]]), "--out", tmp_path / "mixed.jsonl"))
    assert "row 6: the group 'a' goes on behind rows of other" in told


def test_it_ends_with_the_rewards_of_each_data_source_and_the_lowest(server, score, row, run_cli, tmp_path):
    rows = [
        row(n, response=f"It is {n + n % 2:03}.", data_source="odd" if n % 4 else "even \x1b[1m") for n in range(40)
    ]
    rows[8]["response"] = "It is BAD"
    result = score(rows)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert next(line for line in lines if line[:1] == ["odd"])[:7] == ["odd", "30", "0", "0.6667", "0", "1", "1"]
    assert next(line for line in lines if line[:1] == ["even"])[2:7] == ["10", "1", "0", "0", "0"]
    lowest = result.stdout.partition("lowest:\n")[2].splitlines()[:5]
    assert [line.split()[:3] for line in lowest] == [["0", "line", str(n)] for n in (1, 3, 5, 7, 11)]
    assert "\x1b" not in result.stdout
    (command,) = (line for line in result.stdout.splitlines() if "qreward why" in line)
    told = exited(run_cli(*shlex.split(command.partition("qreward ")[2])))
    assert " · sample line 1 · " in told.stdout
    assert " · reward 0 " in told.stdout


def test_failed_rows_keep_their_place_and_only_they_are_tried_again(server, score, scored, row, run_cli):
    result = score([row(n, response=f"It is {n + 1:03}." + (" BAD" if n in (3, 17) else "")) for n in range(20)])
    assert result.exit_code == 3
    assert "18 of 20 rows have a reward" in result.stdout
    assert "2 without a reward (verdict/invalid): " in result.stderr
    (command,) = (line for line in result.stderr.splitlines() if "qreward why" in line)
    assert " · sample line 18 · " in exited(run_cli(*shlex.split(command.partition("qreward ")[2]))).stdout
    assert [n for n, outcome in enumerate(scored()) if outcome["reward"] is None] == [3, 17]
    failed = scored()[3]
    assert (failed["outcome"], failed["cause"], failed["reason"]) == ("failed", "verdict", "invalid")
    assert failed["detail"]
    assert set(failed) == KEYS
    assert score().exit_code == 3
    assert server.report().requests == 22


def test_every_reason_is_told_with_its_number_and_a_floor_is_a_reward(score, scored, row, server, write_config):
    write_config({"a": server}, judge={"reward_range": [-1, 1]}, routes={"math/*": "quality"})
    sources, responses = ["math/x", "code/x", "code/y", "math/x", "math/x"], ["001", "001", "001", "BAD", "  "]
    rows = [
        row(n, data_source=one, response=said) for n, (one, said) in enumerate(zip(sources, responses, strict=True))
    ]
    result = exited(score(rows), 3)
    told = [line for line in result.stderr.splitlines() if "without a reward" in line or "floor" in line]
    assert [line.partition(":")[0] for line in told] == [
        "2 without a reward (infra/no_route)",
        "1 without a reward (verdict/invalid)",
        "1 scored at the floor (policy/empty)",
    ]
    assert "'code/x'" in told[0]
    assert (scored()[4]["reward"], scored()[4]["cause"]) == (-1.0, "policy")


def test_a_sample_has_its_line_its_step_and_its_group(score, row, tmp_path, write_config):
    rows = [row(0, step=3, group_id="g"), "\n", row(1, step=4, group_id=7), row(2, step="three", id="mine")]
    rows += [row(3, step=5.0, group_id=8.0), row(4, step=5.5, group_id=None)]  # as pandas writes them beside a null
    assert score(rows).exit_code == 0
    names = {*sql(tmp_path / "out.jsonl.journal", "SELECT sample_id, step, group_id FROM outcomes")}
    lines = {("line 1", 3, "g"), ("line 3", 4, "7"), ("line 5", 5, "8"), ("line 6", None, None)}
    assert names == {*lines, ("mine", None, None)}


def test_the_journal_of_the_configuration_is_used_and_read(server, score, write_config, row, tmp_path):
    journal = tmp_path / "verdicts.sqlite"
    write_config({"a": server}, engine={"journal": {"path": str(journal), "reuse": False}})
    assert score([row(n) for n in range(5)]).exit_code == 0
    assert (journal.exists(), (tmp_path / "out.jsonl.journal").exists()) == (True, False)
    assert score(out="another.jsonl").exit_code == 0
    assert server.report().requests == 5


def test_the_reference_is_that_of_the_row_or_of_its_reward_model(write_rows):
    row = {"prompt": "q", "response": "r", "reward_model": {"ground_truth": "42"}}
    found = read_rollouts(write_rows([row, {**row, "ground_truth": "7"}]))
    assert [one.sample.ground_truth for one in found] == ["42", "7"]


ODD_ROWS = [
    '{"prompt": "half a pair \\ud83d", "response": "001 \\udc00", "ground_truth": "001", "odd": "\\ud800"}\n',
    '{"prompt": "NaN", "response": "001", "ground_truth": "001", "odd": [NaN, -Infinity, {"x": Infinity}]}\n',
    '{"prompt": "long", "response": "001", "ground_truth": "001", "odd": 123456789012345678901234567890}\n',
    '{"prompt": "deep", "response": "001", "ground_truth": "001", "odd": ' + "[" * 300 + "]" * 300 + "}\n",
    json.dumps({"prompt": "own", "response": "001", "ground_truth": "001", "qreward": {"reward": 9}, "id": 7}) + "\n",
    '{"prompt": "\\u00e9\U0001f600\u2028", "response": "001", "ground_truth": "001"}\r\n',
    "\n",
    '{"prompt": "last", "response": "001", "ground_truth": "001"}',
]


def test_odd_rows_are_neither_lost_nor_changed(score, read_rows, tmp_path):
    assert score(ODD_ROWS).exit_code == 0
    lines = read_rows(tmp_path / "out.jsonl")
    assert [line.pop("qreward")["reward"] for line in lines] == [1.0] * 7
    given = [json.loads(line, parse_constant=lambda _: None) for line in ODD_ROWS if line.strip()]
    assert lines == [{name: value for name, value in line.items() if name != "qreward"} for line in given]
    for line in (tmp_path / "out.jsonl").read_bytes().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_what_exists_is_replaced_only_when_it_is_said(score, server, row, tmp_path):
    (tmp_path / "out.jsonl").write_text("precious")
    result = score([row(1)], overwrite=False)
    assert (result.exit_code, (tmp_path / "out.jsonl").read_text()) == (2, "precious")
    assert "out.jsonl: exists" in result.output.replace("\n", "")
    told = refusal(score([row(1), row(2, qreward="precious")], out="b.jsonl", overwrite=False))
    assert "line 2: has a column 'qreward'" in told
    assert server.report().requests == 0
    assert score().exit_code == 0
    assert "reward" in (tmp_path / "out.jsonl").read_text()


def test_one_run_at_a_time_writes_an_out_and_an_earlier_one_stays_until_it_is_whole(
    server, score, write_rows, row, tmp_path
):
    write_rows([row(0)])
    out = tmp_path / "out.jsonl"
    out.write_text("earlier")
    with suppress(ZeroDivisionError), open_writer(out):
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
    '{"response": "r"}\n': "needs a column messages or prompt; it has response",
    '{"prompt": "q", "response": ["r"]}\n': "response must be a text, not a list",
    '{"prompt": "q", "turns": [{"role": "tool", "content": "42"}]}\n': "no message of the role assistant",
    '{"prompt": "q", "response": "r", "x": ' + "[" * 200_000 + "]" * 200_000 + "}\n": "nested too deeply",
}


@each_of("line", BAD_LINES)
def test_a_bad_row_is_named_by_its_line(line, refused, write_rows):
    write_rows([GOOD, GOOD, "\n", line, GOOD])
    message = refused()
    assert "in.jsonl, line 4: " in message
    assert BAD_LINES[line] in message


def test_a_reference_in_a_column_of_another_name_is_told_of(score):
    told = "in.jsonl: the first row has no ground_truth, so its judge sees none; if one of its other columns (answer)"
    for row, times in (({**GOOD, "answer": "4"}, 1), (GOOD, 0), ({**GOOD, "answer": "4", "ground_truth": "4"}, 0)):
        assert score([row, row]).stderr.count(told) == times


def test_bad_rows_are_named_at_once(score):
    result = score([{"response": "r"}, GOOD, *[{"prompt": "q"}] * 7])
    *named, last = result.stderr.splitlines()
    assert (result.exit_code, last) == (2, "... and 3 more rows")
    for number, line in zip((1, 3, 4, 5, 6), named, strict=True):
        assert f"in.jsonl, line {number}: needs a column" in line


def test_files_that_cannot_be_are_named(refused, score, write_rows, tmp_path):
    (tmp_path / "none.parquet").write_bytes(b"PAR1 or not")
    os.mkfifo(tmp_path / "pipe.jsonl")
    write_rows(["\n  \n"], name="empty.jsonl")
    write_rows([GOOD], name="[red]:warning:.txt")
    write_rows([GOOD])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    for options, said in (
        ({"source": "missing.jsonl"}, "missing.jsonl: cannot be read (No such file or directory)"),
        ({"source": "none.parquet"}, "none.parquet: not a readable parquet file"),
        ({"source": "pipe.jsonl"}, "pipe.jsonl: is no file (a pipe, for example), and rows are read twice"),
        ({"source": "empty.jsonl"}, "empty.jsonl: has no rows"),
        ({"source": "[red]:warning:.txt"}, "[red]:warning:.txt: the name must end in .jsonl, .json or .parquet"),
        ({"out": "no/such/out.jsonl"}, "out.jsonl: there is no directory"),
        ({"out": "out.parquet"}, "the name must end in .jsonl"),
        ({"out": "link.jsonl"}, "is the input itself"),
    ):
        assert said in refused(**options)
    # A byte order mark is no mistake, and a file of the suffix json may hold a list.
    (tmp_path / "in.json").write_bytes(b"\xef\xbb\xbf" + json.dumps([GOOD]).encode())
    assert score(source="in.json").exit_code == 0


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
        {"prompt": "What?", "images": ["../outside.png"], "response": "5"},
    ]
    write_config({"a": server}, source={"vision": True})
    assert score(rows).exit_code == 3
    assert [one["outcome"] for one in scored()] == ["scored"] * 2 + ["failed"]
    assert "is a path" in scored()[2]["detail"]


def test_turns_are_a_response_and_other_columns_of_this_name_are_not(write_rows):
    said = [{"role": "assistant", "content": "I look"}, {"role": "tool", "content": [{"text": "42"}]}]
    said += [{"role": "assistant", "content": "It is 42"}]
    whole = {"prompt": "q", "response": "ab", "turns": [{"role": "assistant", "content": "ab", "end": 2}]}
    rows = [{"prompt": "q", "turns": said}, whole]
    rows += [{**GOOD, "turns": ["q2"], "key": "outer", "extra_info": {"key": "inner"}}]
    several, given, other = (rollout.sample for rollout in read_rollouts(write_rows(rows)))
    assert several.response == "assistant: I look\n\ntool: 42\n\nassistant: It is 42"
    assert [turn["content"] for turn in several.turns] == ["I look", "42", "It is 42"]
    assert list(given.turns) == whole["turns"]
    assert (other.turns, other.extras) == ((), {"turns": ["q2"], "key": "inner"}), "as a function sees them in training"


# Parquet: rows of any column types come out as JSON lines


def test_parquet_comes_out_as_json_lines(score, read_rows, tmp_path):
    """Also of columns that JSON has no types for, and of more rows than are read at once."""
    numbers = range(100)
    moment = datetime.datetime(2024, 1, 2, 3, 4, 5, 678901)
    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))
    columns = {
        "messages": pa.array([[{"role": "user", "content": f"{n}?", "name": None}] for n in numbers], messages),
        "response": pa.array([f"It is {n}." for n in numbers], pa.large_string()),
        "ground_truth": pa.array([str(n) for n in numbers]),
        "nan": pa.array([float("nan") if n % 2 else None for n in numbers]),
        "decimal": pa.array([Decimal(n) / 100 for n in numbers], pa.decimal128(10, 2)),
        "moment": pa.array([moment] * 100, pa.timestamp("ns", tz="UTC")),
        "bytes": pa.array([b"\xff\x00" + bytes([n]) for n in numbers]),
    }
    parquet.write_table(pa.table(columns), tmp_path / "in.parquet")
    assert score(source="in.parquet").exit_code == 0
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row.pop("qreward")["reward"] for row in rows] == [1.0] * 100
    assert [row["ground_truth"] for row in rows] == [str(n) for n in numbers]
    assert rows[1] == {
        "messages": [{"role": "user", "content": "1?", "name": None}],
        "response": "It is 1.",
        "ground_truth": "1",
        "nan": None,
        "decimal": "0.01",
        "moment": "2024-01-02T03:04:05.678901+00:00",
        "bytes": "/wAB",
    }


def test_what_cannot_be_scored_is_one_message(refused, tmp_path, monkeypatch):
    table = pa.table({"prompt": ["q"] * 100, "response": ["r"] * 99 + [None]})
    for rows, said in (
        (table, "in.parquet, row 100: response is null"),
        (table.slice(0, 0), "in.parquet: has no rows"),
    ):
        parquet.write_table(rows, tmp_path / "in.parquet")
        assert said in refused(source="in.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'qreward-plugins[parquet]'" in refused(source="in.parquet")
