"""`qreward score` over parquet: what comes out are the input's own columns, whatever their types."""

from __future__ import annotations

import datetime
import sys
from decimal import Decimal

import pyarrow as pa
import pytest
from pyarrow import parquet

from qreward_plugins import Cause, Failed, Scored, Verdict
from qreward_plugins.files import check_rollouts, open_writer, read_rollouts

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))


def rich_table(rows: int) -> pa.Table:
    """A column of every kind that is met in data sets."""
    numbers = range(rows)
    moment = datetime.datetime(2024, 1, 2, 3, 4, 5, 678901)
    columns = {
        "messages": pa.array([[{"role": "user", "content": f"{n}?", "name": None}] for n in numbers], MESSAGES),
        "response": pa.array([f"It is {n}." for n in numbers], pa.large_string()),
        "ground_truth": pa.array([str(n) for n in numbers]),
        "data_source": pa.array(["x"] * rows).dictionary_encode(),
        "reward_model": pa.array([{"style": "rule", "n": n} for n in numbers]),
        "float32s": pa.array([[float(n)] * 3 for n in numbers], pa.list_(pa.float32())),
        "pair": pa.array([[n, -n] for n in numbers], pa.list_(pa.int16(), 2)),
        "uint64": pa.array([2**64 - 1 - n for n in numbers], pa.uint64()),
        "nan": pa.array([float("nan") if n % 2 else None for n in numbers]),
        "decimal": pa.array([Decimal(n) / 100 for n in numbers], pa.decimal128(10, 2)),
        "moment": pa.array([moment] * rows, pa.timestamp("ns", tz="UTC")),
        "day": pa.array([moment.date()] * rows),
        "took": pa.array([datetime.timedelta(seconds=n) for n in numbers]),
        "bytes": pa.array([b"\xff\x00" + bytes([n % 256]) for n in numbers]),
        "map": pa.array([[("a", n)] for n in numbers], pa.map_(pa.string(), pa.int32())),
        "nothing": pa.nulls(rows),
    }
    return pa.table(columns).replace_schema_metadata({"made by": "a test"})


@pytest.fixture
def score(run_cli, server, write_config, tmp_path):
    write_config({"a": server})

    def run(table=None, rows="in.parquet", out="out.parquet"):
        if table is not None:
            parquet.write_table(table, tmp_path / rows)
        return run_cli("score", tmp_path / "config.yaml", tmp_path / rows, "-o", tmp_path / out, "--overwrite")

    return run


def test_columns_and_types_are_kept(score, server, tmp_path):
    table = rich_table(40)
    assert score(table).exit_code == 0
    scored = parquet.read_table(tmp_path / "out.parquet")
    assert scored.schema.metadata[b"made by"] == b"a test"
    assert scored.column_names == [*table.column_names, "qreward"]
    for name in table.column_names:
        assert scored.schema.field(name) == parquet.read_schema(tmp_path / "in.parquet").field(name)
        # NaN is not equal to itself, so it is compared by its text.
        assert str(scored[name].to_pylist()) == str(table[name].to_pylist())
    outcomes = scored["qreward"].to_pylist()
    assert [outcome["reward"] for outcome in outcomes] == [1.0] * 40
    assert {outcome["components"] for outcome in outcomes} == {"{}"}
    assert scored.schema.field("qreward").type.field("reward").type == pa.float64()
    assert score(rows="out.parquet", out="again.parquet").exit_code == 0
    assert parquet.read_table(tmp_path / "again.parquet").column_names == [*table.column_names, "qreward"]


def test_parquet_to_jsonl_and_a_row_that_is_the_same_sample_in_both(score, server, read_rows, tmp_path):
    """So that a file that was scored as JSONL costs nothing as parquet."""
    assert score(rich_table(3), out="out.jsonl").exit_code == 0
    row = read_rows(tmp_path / "out.jsonl")[1]
    assert row.pop("qreward")["reward"] == 1.0
    assert row == {
        "messages": [{"role": "user", "content": "1?", "name": None}],
        "response": "It is 1.",
        "ground_truth": "1",
        "data_source": "x",
        "reward_model": {"style": "rule", "n": 1},
        "float32s": [1.0, 1.0, 1.0],
        "pair": [1, -1],
        "uint64": 2**64 - 2,
        "nan": None,
        "decimal": "0.01",
        "moment": "2024-01-02T03:04:05.678901+00:00",
        "day": "2024-01-02",
        "took": "0:00:01",
        "bytes": "/wAB",
        "map": [["a", 1]],
        "nothing": None,
    }
    (tmp_path / "out.jsonl.journal").rename(tmp_path / "out.parquet.journal")
    assert score().exit_code == 0
    assert server.report().requests == 3


def test_row_groups_and_odd_texts(tmp_path):
    """More rows than fit a row group, over a source with groups of another size."""
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    parquet.write_table(rich_table(2500), source, row_group_size=700)
    assert check_rollouts(source, out=out) == 2500
    odd = Failed(Cause.INFRA, "exhausted", "half a pair \ud800")
    with open_writer(out, source=source) as write:
        for n, rollout in enumerate(read_rollouts(source)):
            write(rollout.row, odd if n == 1024 else Scored(Verdict(float(n), components={"a\ud800": 1.0})))
    scored = parquet.read_table(out)
    assert scored.column("ground_truth").to_pylist() == [str(n) for n in range(2500)]
    rewards = [outcome["reward"] for outcome in scored["qreward"].to_pylist()]
    assert rewards == [None if n == 1024 else float(n) for n in range(2500)]
    assert scored["qreward"][1024].as_py()["detail"] == "half a pair ?"
    assert scored["qreward"][0].as_py()["components"] == '{"a?":1.0}'
    assert parquet.read_metadata(out).num_row_groups < 10


def test_what_cannot_be_scored_is_one_message(score, monkeypatch):
    table = pa.table({"prompt": ["q"] * 100, "response": ["r"] * 99 + [None]})
    assert "in.parquet, row 100: response is null" in score(table).stderr
    assert "in.parquet: has no rows" in score(table.slice(0, 0)).stderr
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'qreward-plugins[parquet]'" in score().stderr
