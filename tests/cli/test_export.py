"""`qreward export`: tables, logs for Inspect View, and traces, of samples that a judge server has scored."""

from __future__ import annotations

import http.server
import json
import re
import sqlite3
import threading
import zipfile
from contextlib import closing

import pytest

from qreward_plugins.cli.export import trace
from qreward_plugins.journal.stories import Stories
from qreward_plugins.samples import Sample, Scored, Verdict
from qreward_plugins.testing import Faults, JudgeServer

from ..kit import each_of, record
from .conftest import refusal, score_of


@pytest.fixture
def journal(run_cli, write_config, write_rows, row, tmp_path):
    """Six samples in two groups: one wrong, one without a verdict, and one that was asked twice."""
    rows = [row(n, group_id=f"g{n // 3}", step=4, system="\x1b[2J") for n in range(6)]
    rows[1]["response"] = "It is 7 <script>."
    rows[2]["response"] = "BAD"
    rows[5]["messages"] = [{"role": "tool", "content": "?"}, *rows[5]["messages"]]
    with JudgeServer(score_of, faults=Faults(script=lambda number: "error_500" if number == 0 else None)) as server:
        config = write_config({"a": server}, source={"limits": {"concurrency": 1}})
        assert run_cli("score", config, write_rows(rows), "--out", tmp_path / "out.jsonl").exit_code == 3
    path = tmp_path / "out.jsonl.journal"
    with closing(sqlite3.connect(path)) as connection:
        (run,) = connection.execute("SELECT run_id FROM outcomes LIMIT 1").fetchone()
    return path, run


def test_a_table_has_every_entry_with_its_texts(journal, run_cli, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    path, run = journal
    with closing(sqlite3.connect(path)) as connection, connection:
        columns = "run_id, recorded_at, sample_id, group_id, step, reward, advantage, masked"
        values = (run, 1.0, "line 1", "g0", 4, 0.9, -0.25, 1)
        connection.execute(f"INSERT INTO trained ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    out = tmp_path / "table.parquet"
    result = run_cli("export", path, "--parquet", out)
    assert result.exit_code == 0, result.output
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


def test_a_log_that_inspect_opens(journal, run_cli, tmp_path):
    path, _ = journal
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


def test_the_reader_of_inspect_reads_the_log(journal, run_cli, tmp_path):
    reader = pytest.importorskip("inspect_ai.log")
    out = tmp_path / "run.eval"
    assert run_cli("export", journal[0], "--inspect", out).exit_code == 0
    log = reader.read_eval_log(str(out))
    assert reader.read_eval_log_sample(str(out), id="line 2", epoch=5).target == "002"
    assert {sample.id for sample in log.samples} == {f"line {number}" for number in range(1, 7)}


@pytest.fixture
def spans(journal):
    """The spans of all samples, by the SDK's exporter that keeps them in memory."""
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(kept))
    with Stories([str(journal[0])]) as stories:
        for story in stories.every("1"):
            trace(story, tracers)
    return kept.get_finished_spans()


def test_one_trace_a_sample_with_its_attempts_below(spans):
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
def test_what_is_refused(journal, run_cli, tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    assert said in refusal(run_cli("export", journal[0], *options))


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


def test_traces_go_to_the_collector_of_the_environment(journal, run_cli, monkeypatch):
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
        refused, result = (run_cli("export", journal[0], "--otlp") for _ in range(2))
        server.shutdown()
        thread.join()
    assert (refused.exit_code, "the collector did not take the traces" in refused.stderr) == (2, True), refused.output
    assert (result.exit_code, received) == (0, [("/v1/traces", True)] * 2), result.output
