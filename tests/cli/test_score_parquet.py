"""`qreward score` over parquet: rows of any column types come out as JSON lines."""

from __future__ import annotations

import datetime
import sys
from decimal import Decimal

import pyarrow as pa
import pytest
from pyarrow import parquet

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))


def rich_table(rows: int) -> pa.Table:
    """Columns that JSON has no types for."""
    numbers = range(rows)
    moment = datetime.datetime(2024, 1, 2, 3, 4, 5, 678901)
    columns = {
        "messages": pa.array([[{"role": "user", "content": f"{n}?", "name": None}] for n in numbers], MESSAGES),
        "response": pa.array([f"It is {n}." for n in numbers], pa.large_string()),
        "ground_truth": pa.array([str(n) for n in numbers]),
        "nan": pa.array([float("nan") if n % 2 else None for n in numbers]),
        "decimal": pa.array([Decimal(n) / 100 for n in numbers], pa.decimal128(10, 2)),
        "moment": pa.array([moment] * rows, pa.timestamp("ns", tz="UTC")),
        "bytes": pa.array([b"\xff\x00" + bytes([n % 256]) for n in numbers]),
    }
    return pa.table(columns)


@pytest.fixture
def score(run_cli, server, write_config, tmp_path):
    write_config({"a": server})

    def run(table):
        parquet.write_table(table, tmp_path / "in.parquet")
        return run_cli("score", tmp_path / "config.yaml", tmp_path / "in.parquet", "-o", tmp_path / "out.jsonl")

    return run


def test_parquet_comes_out_as_json_lines(score, read_rows, tmp_path):
    assert score(rich_table(100)).exit_code == 0, "more rows than are read at once"
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row.pop("qreward")["reward"] for row in rows] == [1.0] * 100
    assert [row["ground_truth"] for row in rows] == [str(n) for n in range(100)]
    assert rows[1] == {
        "messages": [{"role": "user", "content": "1?", "name": None}],
        "response": "It is 1.",
        "ground_truth": "1",
        "nan": None,
        "decimal": "0.01",
        "moment": "2024-01-02T03:04:05.678901+00:00",
        "bytes": "/wAB",
    }


def test_what_cannot_be_scored_is_one_message(score, monkeypatch):
    table = pa.table({"prompt": ["q"] * 100, "response": ["r"] * 99 + [None]})
    assert "in.parquet, row 100: response is null" in score(table).stderr
    assert "in.parquet: has no rows" in score(table.slice(0, 0)).stderr
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'qreward-plugins[parquet]'" in score(table).stderr
