"""`qreward replay`: the samples of a journal through another judge, and what is asked again for it."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing

import pytest

from qreward_plugins.engine import RewardEngine
from qreward_plugins.judges import leaf
from qreward_plugins.samples import Sample, Scored, Verdict
from qreward_plugins.testing import JudgeServer

from ..kit import make_sample, record
from .conftest import refusal

PRICE = {"input_per_million": 100.0, "output_per_million": 1000.0}


@pytest.fixture
def replay(run_cli, tmp_path):
    def run(journal, config, *options):
        return run_cli("replay", config, journal, "--out", tmp_path / "again.jsonl", *options)

    return run


@pytest.fixture
def scored(run_cli, write_rows, tmp_path):
    """Score rows, and return the journal."""

    def run(config, rows, code=0):
        result = run_cli("score", config, write_rows(rows), "--out", tmp_path / "out.jsonl")
        assert result.exit_code == code, result.output
        return tmp_path / "out.jsonl.journal"

    return run


@pytest.fixture
def journal(scored, server, write_config, row):
    """The journal of twelve rows that `server` has scored; every third response is wrong."""
    rows = [row(n, response=f"It is {n + 1 + (n % 3 == 0):03}.", group_id=f"g{n // 4}", step=n // 6) for n in range(12)]
    return scored(write_config({"a": server}), rows)


def rewards(rows):
    return [row["qreward"]["reward"] for row in rows]


@pytest.fixture
def new_reader(monkeypatch):
    """Another version of the reader: no recorded verdict counts any more."""
    monkeypatch.setattr(leaf, "_VERSION", leaf._VERSION + 1)


def test_another_reader_takes_no_call(journal, replay, server, write_config, read_rows, tmp_path, new_reader):
    before, asked = read_rows(tmp_path / "out.jsonl"), server.report().requests
    result = replay(journal, write_config({"a": server}))
    assert result.exit_code == 0, result.output
    assert "12 samples: 12 replies are read again without a call\n0 calls\n" in result.stdout
    assert server.report().requests == asked
    # In the order of the journal, which is the order of the answers.
    after = sorted(read_rows(tmp_path / "again.jsonl"), key=lambda row: row["extra_info"]["number"])
    assert rewards(after) == rewards(before)
    assert [row["before"]["reward"] for row in after] == rewards(before)
    for name in ("messages", "response", "ground_truth", "data_source", "step", "group_id"):
        assert [row[name] for row in after] == [row[name] for row in before]
    assert [row["extra_info"]["number"] for row in after] == list(range(12))


def test_another_question_is_asked_and_its_price_said_before(journal, replay, run_cli, server, write_config, tmp_path):
    config = write_config({"a": server}, judge={"instructions": "Be strict."}, source={"price": PRICE})
    asked = server.report().requests
    dry = replay(journal, config, "--dry-run")
    assert (dry.exit_code, (tmp_path / "again.jsonl").exists()) == (0, False)
    assert "12 samples: 0 replies are read again without a call\n" in dry.stdout
    assert server.report().requests == asked
    said = re.search(
        r"12 calls to a, about ([\d.]+) USD: ([\d,]+) prompt and ([\d,]+) completion tokens a call", dry.stdout
    )
    dollars, prompt, completion = (float(number.replace(",", "")) for number in said.groups())
    assert dollars == pytest.approx(12 * (100 * prompt + 1000 * completion) / 1e6, abs=0.02)
    result = replay(journal, config)
    assert result.exit_code == 0, result.output
    assert said.group() in result.stdout
    assert server.report().requests == asked + 12
    assert f"qreward diff {journal} {tmp_path}/again.jsonl.journal" in result.stdout
    # What a killed replay has paid for is not asked again.
    again = replay(journal, config, "--overwrite")
    assert "0 replies are read again without a call, and 12 are in the journal of the replay\n0 calls\n" in again.stdout
    assert server.report().requests == asked + 12
    diff = run_cli("diff", journal, tmp_path / "again.jsonl.journal")
    assert "12 samples with a reward in both" in diff.stdout, diff.output


def test_only_some_samples(journal, replay, server, write_config, read_rows, tmp_path):
    result = replay(journal, write_config({"a": server}), "--where", "step = 1 and score < 0.5")
    assert result.exit_code == 0, result.output
    assert sorted(row["id"] for row in read_rows(tmp_path / "again.jsonl")) == ["line 10", "line 7"]


def test_samples_come_back_as_they_were(replay, server, write_config, tmp_path, new_reader):
    """A ground truth of any type, extras, the split, a text in parts, and lone surrogates, which no file can hold."""
    path = tmp_path / "journal.sqlite"
    judge = {"instructions": "Hint: {{ extras.hint }}"}
    first = write_config({"a": server}, judge=judge, engine={"journal": {"path": str(path), "keep": "all"}})
    parts = [{"type": "text", "text": "What?"}]
    samples = [
        Sample([{"role": "user", "content": parts}], "4", 4, extras={"hint": "h"}, split="val", id="a"),
        Sample([{"role": "user", "content": "?"}], "4 \ud800", {"x": [1]}, extras={"hint": 1}, step=7, id="b"),
        Sample([{"role": "user", "content": "?"}], "4", "4", extras={"hint": None}, group_id="g"),
    ]

    with RewardEngine(first).portal() as engine:
        outcomes = engine.score_all(samples)
    asked = server.report().requests
    result = replay(path, write_config({"a": server}, judge=judge, name="again.yaml"))
    assert result.exit_code == 0, result.output
    # The second one has another character in place of half of a pair, so it is another question.
    assert "3 samples: 2 replies are read again without a call\n1 call to a: " in result.stdout, outcomes
    assert server.report().requests == asked + 1


def test_what_cannot_be_judged_again(journal, replay, server, write_config, tmp_path):
    config = write_config({"a": server})
    with closing(sqlite3.connect(journal)) as book, book:
        book.execute("UPDATE outcomes SET prompt = NULL WHERE step = 0")
    result = replay(journal, config)
    assert "6 samples of 12 left out: their texts are not kept whole" in result.stderr
    assert "6 samples: 6 replies" in result.stdout
    for options, said in (
        (["--overwrite", "--where", "stepp = 1"], "no such column: stepp"),
        (["--overwrite", "--where", "step = 0"], "no sample can be judged again"),
        (["--out", tmp_path / "again.parquet"], "must end in .jsonl"),
        ([], "exists; name another file"),
    ):
        assert said in refusal(replay(journal, config, *options))


def test_samples_under_one_id_are_told_apart_by_their_responses(
    scored, replay, server, write_config, row, read_rows, tmp_path
):
    config = write_config({"a": server})
    journal = scored(config, [row(0, id="q"), row(0, id="q", response="It is nothing.")])
    assert replay(journal, config).exit_code == 0
    again = [(each["response"], each["before"]["reward"]) for each in read_rows(tmp_path / "again.jsonl")]
    assert sorted(again) == [("It is 001.", 1.0), ("It is nothing.", 0.0)]


def test_a_run_that_was_resumed_is_replayed_once(journal, replay, run_cli, server, write_config, read_rows, tmp_path):
    config = write_config({"a": server})
    resumed = run_cli("score", config, tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--overwrite")
    assert resumed.exit_code == 0
    assert "12 samples: 12 replies" in replay(journal, config).stdout
    assert len(read_rows(tmp_path / "again.jsonl")) == 12
    own = replay(journal, config, "--out", tmp_path / "out.jsonl", "--overwrite")
    assert (own.exit_code, "is the journal of the replay itself" in own.stderr) == (2, True)


def test_a_sample_that_would_come_back_as_another_one_is_left_out(replay, server, write_config, tmp_path):
    others = ({"ground_truth": {4}}, {"extras": {1: "x"}}, {"response_images": ("image",)})
    scored = Scored(Verdict(1.0, judge="quality", source="a"))
    path = tmp_path / "journal.sqlite"
    record(path, [(make_sample(number, **other), scored) for number, other in enumerate(others)], keep="all")
    assert "3 samples of 3 left out" in refusal(replay(path, write_config({"a": server})))


@pytest.mark.parametrize("judge", [{}, {"instructions": "By the judge server."}], ids=["read again", "asked again"])
def test_what_is_redacted_stays_so(judge, journal, replay, server, write_config, tmp_path):
    engine = {"journal": {"path": "unused.sqlite", "redact": ["judge server"]}}
    config = write_config({"a": server}, judge=judge, engine=engine)
    assert replay(journal, config).exit_code == 0
    with closing(sqlite3.connect(tmp_path / "again.jsonl.journal")) as book:
        assert book.execute("SELECT DISTINCT rationale FROM outcomes").fetchall() == [("scored by the [redacted]",)]


def test_a_part_that_failed_is_no_failure_of_its_sample(run_cli, scored, write_config, row):
    """Nor the worst sample: an early stage of a cascade may fail, or score low."""
    llm = {"kind": "llm", "score_range": [0, 1], "invalid_retries": 0}
    judges = {
        "early": {**llm, "correct_at": 0.5, "instructions": "BAD at once"},
        "late": {**llm, "instructions": "{{ extras.hint }}"},
        "both": {"kind": "cascade", "stages": [{"judge": "early", "decides": {"above": 1}}, {"judge": "late"}]},
    }

    def says(call):
        return "no verdict" if call.prompt.startswith("BAD") and "2" in call.blocks["response"] else 0.75

    with JudgeServer(says) as own:
        journal = scored(write_config({"a": own}, judges=judges), [row(n, hint="?") for n in range(3)])
    assert "matches --failed;" in refusal(run_cli("why", journal, "--failed"))
    assert "reward 0.75" in run_cli("why", journal, "--worst").stdout
