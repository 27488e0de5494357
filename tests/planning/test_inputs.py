"""Lengths, latencies and data sources as people write them, and what a journal recorded."""

from __future__ import annotations

import json
import os
import random
from statistics import fmean

import pytest

from qreward_plugins import InputError, RewardEngine, Sample, load_config
from qreward_plugins.journal import Journal
from qreward_plugins.planning import Lengths, parse_data_source, parse_latency, parse_lengths
from qreward_plugins.planning.recorded import read_recorded
from qreward_plugins.planning.rollouts import default_data_source
from qreward_plugins.simulation import Luck, Server, SimulatedServer, run

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
    [({"math/*": "quality", "*": "quality"}, "any"), ({"math/[gs]?": "quality"}, "math/gx"), ({}, "")],
)
def test_a_data_source_is_made_up_for_the_route(tree, routes, name):
    assert default_data_source(load_config({**tree(a={}), "routes": routes})) == name
    with pytest.raises(InputError, match="--data-source"):
        default_data_source(load_config({**tree(a={}), "routes": {"[!a-z]": "quality"}}))


# What a journal tells


def record(path, config, latency_s, samples: int) -> None:
    """Score a batch in virtual time, and record the outcomes as an engine would."""
    entries = []

    async def batch() -> None:
        luck = Luck(0)
        servers = {
            name: SimulatedServer(Server(name, seconds_per_unit=latency_s[name], concurrency=8), luck)
            for name in config["sources"]
        }
        made = [
            Sample([{"role": "user", "content": "?"}], "x" * 400, id=f"{n}", extras={"work": 1}) for n in range(samples)
        ]
        async with RewardEngine({**config, "engine": {"seed": 0}}, sources=servers) as engine:
            entries.extend(zip(made, await engine.score_all(made), strict=True))

    run(batch())
    ends = iter([1e9 + outcome.verdict.latency_s for _, outcome in entries])
    journal = Journal(path, clock=lambda: next(ends))
    for sample, outcome in entries:
        journal.note("key", sample, outcome)
    journal.close()


def test_waiting_is_no_part_of_a_recorded_latency(tmp_path, tree, exact_plan):
    """A batch of 20 times the places: most of what the journal holds is waiting."""
    path = str(tmp_path / "verdicts.sqlite")
    config = tree(a={"concurrency": 8}, b={"concurrency": 8}, c={})
    record(path, {**config, "sources": {name: config["sources"][name] for name in "ab"}}, {"a": 1.0, "b": 4.0}, 320)
    recorded = read_recorded(path, ["a", "b", "c"])
    assert set(recorded) == {"a", "b"}
    assert recorded["a"].latency_s == pytest.approx(1.0, rel=0.1)
    assert recorded["b"].latency_s == pytest.approx(4.0, rel=0.1)
    assert recorded["a"].completion_tokens == pytest.approx(150)
    assert recorded["a"].prompt_tokens
    found = exact_plan({**config, "engine": {"journal": {"path": path}}}, 16, lengths=None, latency_s={"b": 2.0})
    used = {use.name: use for use in found.sources}
    assert [used[name].latency_from for name in "abc"] == ["journal", "given", "assumed"]
    assert used["a"].latency_s == recorded["a"].latency_s
    assert f"({recorded['a'].verdicts} verdicts in the journal)".replace("(", "(from ") in " ".join(found.notes)
    assert "from the journal" in found.notes[0]
    assert os.listdir(tmp_path) == ["verdicts.sqlite"]
    # The judge's own words are in its requests as before, and not once more in the rollouts.
    assert fmean(bar.tokens for bar in found.timeline.bars) == pytest.approx(
        fmean(recorded["a"].prompt_tokens) + 150, rel=0.1
    )
