"""Lengths, latencies and data sources as people write them, and what a journal recorded."""

from __future__ import annotations

import json
import random
from statistics import fmean

import pytest

from qreward_plugins import InputError, load_config
from qreward_plugins.planning import Lengths
from qreward_plugins.planning.rollouts import default_data_source, parse_lengths
from qreward_plugins.planning.setting import parse_data_source, parse_latency

from ..kit import each_of


def test_lengths_are_read():
    assert parse_lengths("800", most=1) == Lengths(800, 0.0)
    assert parse_lengths("lognormal:500:0.9", most=1) == Lengths(500, 0.9)
    drawn = parse_lengths("lognormal:500:0.9", most=1).draw(20_000, random.Random(1))
    assert fmean(drawn) == pytest.approx(500, rel=0.04)
    for text in ("many", "normal:3:4", "lognormal:1:2:3", "0", "nan"):
        with pytest.raises(InputError, match="--tokens"):
            parse_lengths(text, most=1)


def test_rollouts_come_from_a_file_with_their_lengths_and_data_sources(tmp_path, tree, exact_plan):
    path = tmp_path / "rollouts.jsonl"
    rows = [{"prompt": "?", "response": "word " * n, "data_source": f"d{n % 2}"} for n in range(1, 41)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = parse_lengths(f"file:{path}", most=10)
    assert len(lengths.rollouts) == 10
    assert {sample.response for sample in lengths.rollouts} <= {row["response"] for row in rows}
    config = {**tree(a={"concurrency": 8}), "routes": {"d0": "quality"}}
    found = exact_plan(config, 64, lengths=lengths)
    assert 0 < found.judged["quality"] < 64
    assert found.failed["infra/no_route"] == pytest.approx(1 - found.judged["quality"] / 64)
    assert any("data source that no route matches, e.g. 'd1'" in note for note in found.notes)


def test_latencies_are_read(tree):
    config = load_config(tree(a={}, b={}))
    assert parse_latency("3", config) == {"*": 3.0}
    assert parse_latency("a=2, b=0.5", config) == {"a": 2.0, "b": 0.5}
    assert parse_latency("a=2,5", config) == {"a": 2.0, "*": 5.0}
    with pytest.raises(InputError, match="there is no source 'c'; there are a, b"):
        parse_latency("c=2", config)
    with pytest.raises(InputError, match="'soon' is no number of seconds"):
        parse_latency("a=soon", config)
    assert parse_data_source("math/gsm8k=0.7") == ("math/gsm8k", 0.7)
    assert parse_data_source("a=b") == ("a=b", 1.0)


@each_of(
    ("routes", "name"),
    [({"math/*": "quality", "*": "quality"}, "*"), ({"math/g?": "quality"}, "math/g?"), ({}, "")],
)
def test_a_data_source_is_made_up_for_the_route(tree, routes, name):
    assert default_data_source(load_config({**tree(a={}), "routes": routes})) == name
    with pytest.raises(InputError, match="--data-source"):
        default_data_source(load_config({**tree(a={}), "routes": {"math/[gs]": "quality"}}))
