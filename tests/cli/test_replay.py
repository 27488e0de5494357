"""`qreward replay` and `qreward export`: the samples of a journal through another judge, and as tables, logs for
Inspect View and traces.
"""

from __future__ import annotations

import http.server
import json
import re
import threading
import zipfile

import pytest

from qreward_plugins.cli.export import trace
from qreward_plugins.engine import RewardEngine
from qreward_plugins.journal.stories import Stories
from qreward_plugins.judges import leaf
from qreward_plugins.samples import Sample, Scored, Verdict
from qreward_plugins.testing import Faults, JudgeServer

from ..kit import each_of, make_sample, record, sql
from .conftest import exited, refusal, score_of

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
        exited(run_cli("score", config, write_rows(rows), "--out", tmp_path / "out.jsonl"), code)
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
    result = exited(replay(journal, write_config({"a": server})))
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
    result = exited(replay(journal, config))
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
    exited(replay(journal, write_config({"a": server}), "--where", "step = 1 and score < 0.5"))
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
    result = exited(replay(path, write_config({"a": server}, judge=judge, name="again.yaml")))
    # The second one has another character in place of half of a pair, so it is another question.
    assert "3 samples: 2 replies are read again without a call\n1 call to a: " in result.stdout, outcomes
    assert server.report().requests == asked + 1


def test_what_cannot_be_judged_again(journal, replay, server, write_config, tmp_path):
    config = write_config({"a": server})
    sql(journal, "UPDATE outcomes SET prompt = NULL WHERE step = 0")
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
    exited(run_cli("score", config, tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--overwrite"))
    assert "12 samples: 12 replies" in replay(journal, config).stdout
    assert len(read_rows(tmp_path / "again.jsonl")) == 12
    own = refusal(replay(journal, config, "--out", tmp_path / "out.jsonl", "--overwrite"))
    assert "is the journal of the replay itself" in own


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
    said = sql(tmp_path / "again.jsonl.journal", "SELECT DISTINCT rationale FROM outcomes")
    assert said == [("scored by the [redacted]",)]


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


# `qreward export`


@pytest.fixture
def exported(run_cli, write_config, write_rows, row, tmp_path):
    """Six samples in two groups: one wrong, one without a verdict, and one that was asked twice."""
    rows = [row(n, group_id=f"g{n // 3}", step=4, system="\x1b[2J") for n in range(6)]
    rows[1]["response"] = "It is 7 <script>."
    rows[2]["response"] = "BAD"
    rows[5]["messages"] = [{"role": "tool", "content": "?"}, *rows[5]["messages"]]
    with JudgeServer(score_of, faults=Faults(script=lambda number: "error_500" if number == 0 else None)) as server:
        config = write_config({"a": server}, source={"limits": {"concurrency": 1}})
        assert run_cli("score", config, write_rows(rows), "--out", tmp_path / "out.jsonl").exit_code == 3
    path = tmp_path / "out.jsonl.journal"
    ((run,),) = sql(path, "SELECT DISTINCT run_id FROM outcomes")
    return path, run


def test_a_table_has_every_entry_with_its_texts(exported, run_cli, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    path, run = exported
    columns = "run_id, recorded_at, sample_id, group_id, step, reward, advantage, masked"
    values = (run, 1.0, "line 1", "g0", 4, 0.9, -0.25, 1)
    sql(path, f"INSERT INTO trained ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *values)
    out = tmp_path / "table.parquet"
    result = exited(run_cli("export", path, "--parquet", out))
    assert "6 samples exported to" in result.stdout
    rows = {row["sample_id"]: row for row in parquet.read_table(out).to_pylist()}
    assert set(rows) == {f"line {number}" for number in range(1, 7)}
    first, failed = rows["line 1"], rows["line 3"]
    assert (first["reward"], first["advantage"], first["trained_reward"], first["masked"]) == (1.0, -0.25, 0.9, True)
    assert first["response"] == "It is 001."
    assert json.loads(first["prompt"])[0]["content"] == "What is 000 plus 1?"
    assert json.loads(first["extras"])["extras"]["system"] == "\x1b[2J"
    (attempt,) = json.loads(failed["history"])
    assert (attempt["result"], attempt["reply"]) == ("invalid", "I would rather not.")
    assert (failed["reward"], failed["cause"]) == (None, "verdict")
    assert "exists; name another file" in refusal(run_cli("export", path, "--parquet", out))


def test_a_log_that_inspect_opens(exported, run_cli, tmp_path):
    path, _ = exported
    out = tmp_path / "run.eval"
    assert run_cli("export", path, "--inspect", out).exit_code == 0
    with zipfile.ZipFile(out) as archive:
        header, summaries = (json.loads(archive.read(name)) for name in ("header.json", "summaries.json"))
        samples = [json.loads(archive.read(name)) for name in archive.namelist() if name.startswith("samples/")]
        assert "samples/line 2_epoch_5.json" in archive.namelist()
    by_id = {sample["id"]: sample for sample in samples}
    assert header["results"]["scores"][0]["metrics"]["mean"]["value"] == pytest.approx(0.8)
    assert [summary["id"] for summary in summaries] == [sample["id"] for sample in samples]
    wrong, failed = by_id["line 2"], by_id["line 3"]
    assert (wrong["epoch"], wrong["target"], wrong["scores"]["quality"]["value"]) == (5, "002", 0.0)
    assert wrong["messages"][-1]["content"] == "It is 7 <script>."
    assert failed["scores"] == {}
    assert failed["metadata"]["failed"]["quality"].startswith("verdict/")
    assert [turn["role"] for turn in by_id["line 6"]["input"]] == ["user", "user"]


def test_the_reader_of_inspect_reads_the_log(exported, run_cli, tmp_path):
    reader = pytest.importorskip("inspect_ai.log")
    out = tmp_path / "run.eval"
    assert run_cli("export", exported[0], "--inspect", out).exit_code == 0
    log = reader.read_eval_log(str(out))
    assert reader.read_eval_log_sample(str(out), id="line 2", epoch=5).target == "002"
    assert {sample.id for sample in log.samples} == {f"line {number}" for number in range(1, 7)}


def test_one_trace_a_sample_with_its_attempts_below(exported):
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(kept))
    with Stories([str(exported[0])]) as stories:
        for story in stories.every("1"):
            trace(story, tracers)
    spans = kept.get_finished_spans()
    traces = {}
    for span in spans:
        traces.setdefault(span.context.trace_id, []).append(span)
    roots = {each[-1].attributes["qreward.sample"]: each for each in traces.values()}
    # The first request failed, so one sample has two attempts.
    assert sorted(len(each) for each in traces.values()) == [3, 3, 3, 3, 3, 4]
    (twice,) = [each for each in traces.values() if len(each) == 4]
    failed, answered, call, root = twice
    assert [span.attributes["qreward.result"] for span in (failed, answered)] == ["failed", "valid"]
    assert (failed.status.is_ok, failed.attributes["error.type"]) == (False, "failed")
    assert [span.parent and span.parent.span_id for span in twice] == [
        *[call.context.span_id] * 2, root.context.span_id, None,
    ]  # fmt: skip
    assert root.start_time <= call.start_time <= failed.start_time <= failed.end_time <= answered.end_time
    assert answered.attributes["gen_ai.usage.output_tokens"] > 0
    assert roots["line 3"][1].attributes["error.type"].startswith("verdict/")
    events = {name: [event.name for span in each for event in span.events] for name, each in roots.items()}
    assert events == {f"line {n}": ["gen_ai.evaluation.result"] * (n != 3) for n in range(1, 7)}
    assert "rather not" not in str([(dict(span.attributes), span.status.description, span.name) for span in spans])


@each_of(
    ("options", "said"),
    [
        ([], "name one of --parquet FILE, --inspect FILE and --otlp"),
        (["--otlp", "--inspect", "x.eval"], "name one of"),
        (["--parquet", "x.csv"], "must end in .parquet"),
        (["--parquet", "x.parquet", "--where", "stepp = 1"], "no such column: stepp"),
        (["--parquet", "x.parquet", "--where", "step = 7"], "no sample to export"),
    ],
)
def test_what_is_refused(exported, run_cli, tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    assert said in refusal(run_cli("export", exported[0], *options))


def test_odd_ids_are_names_of_files(run_cli, tmp_path):
    ids = ["../../etc/x", "nul\0one", "nul\0two", "x", "x'", "y\n" * 300]
    scored = Scored(Verdict(0.5, judge="j", source="s"))
    for run in ("first", "second"):
        outcomes = [(Sample([], "r", id=name), scored) for name in ids]
        record(tmp_path / "journal.sqlite", outcomes, run_id=run, keep="all")
    out = tmp_path / "run.eval"
    assert run_cli("export", tmp_path / "journal.sqlite", "--inspect", out).exit_code == 0
    with zipfile.ZipFile(out) as archive:
        names = [name for name in archive.namelist() if name.startswith("samples/")]
        assert len(set(names)) == len(names) == 12
        assert all(re.fullmatch(r"samples/[^/\x00-\x1f]{1,220}_epoch_1\.json", name) for name in names)
        assert json.loads(archive.read(names[0]))["id"] == names[0].removeprefix("samples/").partition("_epoch_")[0]


def test_traces_go_to_the_collector_of_the_environment(exported, run_cli, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    received, statuses = [], [400, 200]

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, len(self.rfile.read(int(self.headers["Content-Length"]))) > 0))
            self.send_response(statuses.pop(0))
            self.end_headers()

        def log_message(self, *_): ...

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        refused, result = (run_cli("export", exported[0], "--otlp") for _ in range(2))
        server.shutdown()
        thread.join()
    assert (refused.exit_code, "the collector did not take the traces" in refused.stderr) == (2, True), refused.output
    assert (result.exit_code, received) == (0, [("/v1/traces", True)] * 2), result.output
