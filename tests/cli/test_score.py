"""`qreward score` over JSONL: all rows in order, exit codes, reasons, and what a second run pays."""

from __future__ import annotations

import json
import sqlite3

import pytest

from qreward_plugins.testing import JudgeServer

KEYS = {
    "steps",
    "reward", "outcome", "cause", "reason", "detail", "components", "correct", "rationale", "judge", "source", "model",
    "weight_version",
    "attempts", "prompt_tokens", "completion_tokens", "latency_s", "cost_usd", "cached", "cut",
}  # fmt: skip


@pytest.fixture
def score(run_cli, tmp_path):
    """Run `qreward score` on in.jsonl with config.yaml, to out.jsonl."""

    def run(rows="in.jsonl", config="config.yaml", out="out.jsonl", overwrite=True):
        options = ["--overwrite"] if overwrite else []
        return run_cli("score", tmp_path / config, tmp_path / rows, "--out", tmp_path / out, *options)

    return run


def test_rows_come_out_in_order_with_their_outcome(server, score, write_config, write_rows, read_rows, row, tmp_path):
    rows = [row(n, response=f"It is {n + n % 2:03}.", extra={"nested": [n, None]}) for n in range(60)]
    write_rows(rows)
    write_config({"a": server})
    result = score()
    assert result.exit_code == 0, result.output
    scored = read_rows(tmp_path / "out.jsonl")
    outcomes = [line.pop("qreward") for line in scored]
    assert scored == rows
    assert [outcome["reward"] for outcome in outcomes] == [float(n % 2) for n in range(60)]
    assert all(set(outcome) == KEYS for outcome in outcomes)
    first = outcomes[0]
    assert (first["judge"], first["source"], first["model"], first["attempts"]) == ("quality", "a", "judge", 1)
    assert first["prompt_tokens"] > 0
    assert server.report().requests == 60
    assert "60 of 60 rows have a reward, mean reward 0.5" in result.stdout
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_failed_rows_keep_their_place_and_only_they_are_tried_again(
    server, score, write_config, write_rows, read_rows, row, tmp_path
):
    write_rows([row(n, response=f"It is {n + 1:03}." + (" BAD" if n in (3, 17) else "")) for n in range(20)])
    write_config({"a": server})
    result = score()
    assert result.exit_code == 3
    assert "18 of 20 rows have a reward" in result.stdout
    assert "2 without a reward (verdict/invalid): " in result.stderr
    scored = read_rows(tmp_path / "out.jsonl")
    assert [line["number"] for line in scored] == list(range(20))
    assert [n for n, line in enumerate(scored) if line["qreward"]["reward"] is None] == [3, 17]
    failed = scored[3]["qreward"]
    assert (failed["outcome"], failed["cause"], failed["reason"]) == ("failed", "verdict", "invalid")
    assert failed["detail"]
    assert set(failed) == KEYS
    assert server.report().requests == 20

    assert score().exit_code == 3
    assert server.report().requests == 22

    port = server.port
    server.stop()
    with JudgeServer(lambda call: 0.25, port=port) as mended:
        result = score()
        assert mended.report().requests == 2
    assert result.exit_code == 0
    assert "20 of 20 rows have a reward (18 of them from the journal)" in result.stdout
    scored = read_rows(tmp_path / "out.jsonl")
    assert [line["qreward"]["reward"] for line in scored] == [0.25 if n in (3, 17) else 1.0 for n in range(20)]
    assert [line["qreward"]["cached"] for line in scored] == [n not in (3, 17) for n in range(20)]


def test_a_floor_is_a_reward(server, score, write_config, write_rows, read_rows, row, tmp_path):
    write_rows([row(0), row(1, response="  ")])
    write_config({"a": server}, judge={"reward_range": [-1, 1]})
    result = score()
    assert result.exit_code == 0
    assert "1 scored at the floor (policy/empty): the response is empty" in result.stderr
    outcome = read_rows(tmp_path / "out.jsonl")[1]["qreward"]
    assert (outcome["reward"], outcome["cause"]) == (-1.0, "policy")


def test_every_reason_is_told_with_its_number(server, score, write_config, write_rows, row):
    sources = ["math/x", "code/x", "code/y", "math/x"]
    write_rows([row(n, data_source=name, response="BAD" if n == 3 else "001") for n, name in enumerate(sources)])
    write_config({"a": server}, routes={"math/*": "quality"})
    result = score()
    assert result.exit_code == 3
    reasons = [line for line in result.stderr.splitlines() if "without a reward" in line]
    assert [line.partition(":")[0] for line in reasons] == [
        "2 without a reward (infra/no_route)",
        "1 without a reward (verdict/invalid)",
    ]
    assert "'code/x'" in reasons[0]


def test_the_journal_of_the_configuration_is_used_and_read(
    server, score, write_config, write_rows, verdicts_in, row, tmp_path
):
    journal = tmp_path / "verdicts.sqlite"
    write_rows([row(n) for n in range(5)])
    write_config({"a": server}, engine={"journal": {"path": str(journal), "reuse": False}})
    assert score().exit_code == 0
    assert (verdicts_in(journal), (tmp_path / "out.jsonl.journal").exists()) == (5, False)
    assert score(out="another.jsonl").exit_code == 0
    assert server.report().requests == 5


def test_a_journal_that_is_none_is_one_message(server, score, write_config, write_rows, row, tmp_path):
    write_rows([row(0)])
    write_config({"a": server}, engine={"journal": {"path": str(tmp_path / "in.jsonl")}})
    result = score()
    assert result.exit_code == 2
    assert "is not a journal" in result.stderr
    assert server.report().requests == 0
    assert json.loads((tmp_path / "in.jsonl").read_text()) == row(0)


def test_two_configurations_on_one_out_do_not_mix_and_share_what_was_paid_for(
    server, score, write_config, write_rows, read_rows, row, tmp_path
):
    write_rows([row(n) for n in range(4)])
    write_config({"a": server}, name="one.yaml")
    write_config({"a": server}, name="ten.yaml", judge={"reward_range": [0, 10]})
    for config, reward, paid in (("one.yaml", 1.0, 4), ("ten.yaml", 10.0, 4), ("one.yaml", 1.0, 4)):
        assert score(config=config).exit_code == 0
        assert [line["qreward"]["reward"] for line in read_rows(tmp_path / "out.jsonl")] == [reward] * 4
        assert server.report().requests == paid


def test_an_output_can_be_scored_again(server, score, write_config, write_rows, read_rows, row, tmp_path):
    write_rows([row(n) for n in range(3)])
    write_config({"a": server})
    score()
    assert score(rows="out.jsonl", out="again.jsonl").exit_code == 0
    again = read_rows(tmp_path / "again.jsonl")
    assert [line["qreward"]["reward"] for line in again] == [1.0] * 3
    assert [list(line) for line in again] == [[*row(0), "qreward"]] * 3


ODD_ROWS = [
    '{"prompt": "half a pair \\ud83d", "response": "001 \\udc00", "ground_truth": "001", "odd": "\\ud800"}\n',
    '{"prompt": "NaN", "response": "001", "ground_truth": "001", "odd": [NaN, -Infinity, {"x": Infinity}]}\n',
    '{"prompt": "long", "response": "001", "ground_truth": "001", "odd": 123456789012345678901234567890}\n',
    '{"prompt": "both", "response": "001", "ground_truth": "001", "odd": {"\\ud800": [NaN, -1e400, '
    + "9" * 30
    + "]}}\n",
    '{"prompt": "deep", "response": "001", "ground_truth": "001", "odd": ' + "[" * 300 + "]" * 300 + "}\n",
    json.dumps({"prompt": "huge", "response": "001" + "x" * 3_000_000, "ground_truth": "001"}) + "\n",
    json.dumps({"prompt": "own", "response": "001", "ground_truth": "001", "qreward": {"reward": 9}, "id": 7}) + "\n",
    json.dumps({"prompt": "two", "messages": None, "response": "001", "completion": "9", "ground_truth": "001"}) + "\n",
    '{"prompt": "\\u00e9\U0001f600\u2028", "response": "001", "ground_truth": "001"}\r\n',
    "\n",
    '{"prompt": "last", "response": "001", "ground_truth": "001"}',
]


def test_odd_rows_are_neither_lost_nor_changed(server, score, write_config, write_rows, read_rows, tmp_path):
    write_rows(ODD_ROWS)
    write_config({"a": server})
    assert score().exit_code == 0
    scored = read_rows(tmp_path / "out.jsonl")
    assert [line.pop("qreward")["reward"] for line in scored] == [1.0] * 10
    given = [json.loads(line, parse_constant=lambda _: None) for line in ODD_ROWS if line.strip()]
    for line in given:
        line.pop("qreward", None)
    given[3]["odd"]["\ud800"][1] = None
    assert scored == given
    for line in (tmp_path / "out.jsonl").read_bytes().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_verdicts_that_cannot_be_written_as_they_are_lose_no_row(
    score, write_rows, read_rows, row, tmp_path, write_config
):
    (tmp_path / "functions.py").write_text("def odd(**_):\n    return {'score': 1, '\\ud800': 0.5}\n")
    write_rows([row(0)])
    write_config(
        judge=None,
        judges={"f": {"kind": "function"}},
        sources={"f": {"kind": "function", "function": f"{tmp_path}/functions.py:odd", "mode": "thread"}},
    )
    assert score().exit_code == 0
    assert read_rows(tmp_path / "out.jsonl")[0]["qreward"]["components"] == {"?": 0.5}


def test_samples_are_named_in_the_journal_by_their_line(server, score, write_config, write_rows, row, tmp_path):
    write_rows([row(0), "\n", row(1), row(2, id="mine")])
    write_config({"a": server})
    score()
    connection = sqlite3.connect(tmp_path / "out.jsonl.journal")
    names = {name for (name,) in connection.execute("SELECT sample_id FROM outcomes")}
    connection.close()
    assert names == {"line 1", "line 3", "mine"}


def test_an_earlier_out_stays_until_the_new_one_is_complete(server, write_config, write_rows, row, tmp_path):
    from qreward_plugins.files import open_writer

    source, out = write_rows([row(0)]), tmp_path / "out.jsonl"
    out.write_text("earlier")
    with pytest.raises(ZeroDivisionError), open_writer(out, source=source):
        raise ZeroDivisionError
    assert out.read_text() == "earlier"


def test_one_run_at_a_time_writes_an_out(server, score, write_config, write_rows, row, tmp_path):
    from qreward_plugins.files import open_writer

    source, out = write_rows([row(0)]), tmp_path / "out.jsonl"
    write_config({"a": server})
    with open_writer(out, source=source):
        result = score()
    assert result.exit_code == 2
    assert "another run is writing it" in result.stderr
    assert "stopped after" not in result.stderr, "what the other run has written is not this one's to tell of"
    assert server.report().requests == 0
    assert score().exit_code == 0


def test_a_disk_that_is_full_is_one_message_and_the_run_can_go_on(
    server, score, write_config, write_rows, row, tmp_path, monkeypatch
):
    write_rows([row(n) for n in range(3)])
    write_config({"a": server})
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device")
        patch.setattr("qreward_plugins.files.writing.as_json", lambda _: (_ for _ in ()).throw(full))
        result = score()
    assert result.exit_code == 2
    assert "out.jsonl.partial: cannot be written (No space left on device)" in result.stderr
    assert "Run the same command again" in result.stderr
    paid = server.report().requests
    assert score().exit_code == 0
    assert server.report().requests <= 3 + paid


def test_functions_are_scored_too(score, write_config, write_rows, read_rows, row, tmp_path):
    (tmp_path / "functions.py").write_text(
        "def length(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str), 'extra': extra_info['number'], 'inner': extra_info['key']}\n"
    )
    write_rows([row(n, key="outer", extra_info={"key": n}) for n in range(3)])
    write_config(
        judges={"f": {"kind": "function"}},
        sources={"f": {"kind": "function", "function": f"{tmp_path}/functions.py:length", "workers": 1}},
    )
    assert score().exit_code == 0
    outcomes = [line["qreward"] for line in read_rows(tmp_path / "out.jsonl")]
    assert [outcome["reward"] for outcome in outcomes] == [10.0] * 3
    # `extra_info` wins over a column of the same name, as it is what the function sees in training.
    assert [outcome["components"] for outcome in outcomes] == [{"extra": n, "inner": n} for n in range(3)]


def test_a_sum_is_one_row_with_its_parts(
    server, score, write_config, write_rows, read_rows, row, tmp_path, verdicts_in
):
    judges = {
        "quality": {"kind": "llm", "score_range": [0, 1], "invalid_retries": 0, "criteria": {"proof": "Proven?"}},
        "rules": {"kind": "function"},
    }
    sources = {
        "a": {"kind": "openai", "base_url": server.base_url, "model": "judge"},
        "rm": {"kind": "http", "url": server.score_url, "model": "rm"},
    }
    write_rows([row(1), row(2, response="It is 7."), row(3, response="BAD")])
    for weights, requests in (({"quality": 1, "rules": 1}, 6), ({"quality": 1, "rules": -3}, 8)):
        judges["total"] = {"kind": "sum", "weights": weights}
        write_config(sources=sources, judges=judges, on_failure="exclude")
        result = score()
        assert result.exit_code == 3, result.output
        right, wrong, bad = (line["qreward"] for line in read_rows(tmp_path / "out.jsonl"))
        # The row without a reward is tried again, the others are known part by part.
        assert server.report().requests <= requests
        assert (right["reward"], wrong["reward"], bad["reward"]) == (sum(weights.values()), 0.0, None)
        assert right["components"] == {"quality": 1.0, "quality/proof": 1.0, "rules": 1.0}
        assert (right["judge"], right["source"], right["model"]) == ("total", "a+rm", "judge+rm")
        assert (bad["cause"], bad["reason"], bad["components"]) == ("verdict", "invalid", {})
        assert "2 of 3 rows have a reward" in result.stdout
        assert set(right) == KEYS
    assert right["cached"]
    assert verdicts_in(tmp_path / "out.jsonl.journal") == 4


def test_a_file_that_exists_is_replaced_only_when_it_is_said(score, server, write_config, write_rows, row, tmp_path):
    write_rows([row(1)])
    write_config({"a": server})
    (tmp_path / "out.jsonl").write_text("precious")
    result = score(overwrite=False)
    assert result.exit_code == 2
    assert "out.jsonl: exists" in result.output.replace("\n", "")
    assert "--overwrite" in result.output
    assert (tmp_path / "out.jsonl").read_text() == "precious"
    assert server.report().requests == 0
    assert score().exit_code == 0
    assert "reward" in (tmp_path / "out.jsonl").read_text()


def test_a_column_of_our_name_is_replaced_only_when_it_is_said(score, server, write_config, write_rows, row, tmp_path):
    write_rows([row(1), row(2, qreward="precious")])
    write_config({"a": server})
    result = score(overwrite=False)
    assert result.exit_code == 2
    assert "row 2: has a column 'qreward'" in result.output.replace("\n", "")
    assert server.report().requests == 0
    assert score().exit_code == 0
