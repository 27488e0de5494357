"""`qreward export`: the samples of a journal for other tools. Parquet for tables, an `.eval` log for Inspect View, and
OpenTelemetry traces.

Traces are made from the journal, not while the run scores: so they cost the run nothing, show what the trainer made of
a sample, and can be sent later. The form of an `.eval` log is that of `inspect_ai/log/_recorders/eval.py` (0.3.285);
the names of attributes are those of the semantic conventions for generative AI where there are some.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ..errors import InputError
from ..files.tables import pyarrow_modules
from ..journal.entries import Entry
from ..journal.stories import Stories, Story, turns_of
from ..system.output_files import check_new
from .console import ERRORS, OK, OUT, Journals, Overwrite, Where, number_of, replaced, say

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_BATCH = 1_000
_SENT_AT_ONCE = 100
_SCOPE = "qreward_plugins"
_ODD = re.compile(r"[\x00-\x1f\x7f/\\]")


def command(
    paths: Journals,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A table: one row for each entry, with its texts.")
    ] = None,
    inspect: Annotated[Path | None, typer.Option(metavar="FILE", help="A log for Inspect View, .eval.")] = None,
    otlp: Annotated[
        bool, typer.Option("--otlp", help="Send a trace for each sample, to OTEL_EXPORTER_OTLP_ENDPOINT.")
    ] = False,
    where: Where = "1",
    overwrite: Overwrite = False,
) -> int:
    """Write the samples of journals to a file that pandas or Inspect View reads, or send them as traces.

    Texts are there if the journal has kept them (engine.journal.keep). Exit codes: 0 exported; 2 there is no such
    journal or no sample, FILE exists, or a package is missing.
    """
    if (parquet is not None) + (inspect is not None) + otlp != 1:
        raise InputError("name one of --parquet FILE, --inspect FILE and --otlp")
    for file, ending in ((parquet, ".parquet"), (inspect, ".eval")):
        if file is not None:
            check_new(file, ending, overwrite=overwrite)
    with Stories(paths) as stories:
        count = stories.count(where)
        if not count:
            raise InputError(f"{' and '.join(paths)}: no sample to export")
        every = stories.every(where)
        with ERRORS.status(Text(f"exporting {number_of(count, 'sample')} ...")):
            if parquet is not None:
                _write_parquet(every, parquet)
            elif inspect is not None:
                _write_eval(every, inspect, " and ".join(paths))
            else:
                _send(every)
    to = f" to {parquet or inspect}" if parquet or inspect else ""
    say(OUT, f"{number_of(count, 'sample')} exported{to}")
    return OK


# Parquet

_TYPES = {"int": "int64", "float": "float64", "str": "string"}


def _write_parquet(stories: Iterator[Story], out: Path) -> None:
    arrow, parquet = pyarrow_modules()
    columns = [(field.name, _TYPES[str(field.type).split(" ")[0]]) for field in fields(Entry)]
    columns += [("reward", "float64"), ("trained_reward", "float64"), ("advantage", "float64"), ("masked", "bool")]
    schema = arrow.schema(columns)
    with replaced(out) as partial, parquet.ParquetWriter(partial, schema) as writer:
        rows: list[dict[str, Any]] = []
        for story in stories:
            rows += _rows(story)
            if len(rows) >= _BATCH:
                writer.write_table(arrow.Table.from_pylist(rows, schema))
                rows = []
        writer.write_table(arrow.Table.from_pylist(rows, schema))


def _rows(story: Story) -> Iterator[dict[str, Any]]:
    for entry, attempts in zip(story.entries, story.attempts, strict=True):
        row = {field.name: getattr(entry, field.name) for field in fields(Entry)}
        trained = story.trained.get(entry.sample_id or "")
        if trained is not None:
            row |= {"trained_reward": trained.reward, "advantage": trained.advantage, "masked": trained.masked}
        # With texts in place of hashes.
        yield {**row, "reward": entry.reward, "history": json.dumps(attempts) if attempts else None}


# Inspect


def _write_eval(stories: Iterator[Story], out: Path, name: str) -> None:
    summaries: list[dict[str, Any]] = []
    names: set[tuple[str, int]] = set()
    rewards: dict[str, list[float]] = {}
    judges: Counter[str] = Counter()
    recorded: list[float] = []
    with replaced(out) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for story in stories:
            first = story.sample
            recorded.append(first.recorded_at)
            epoch = max(0, first.step or 0) + 1
            sample_id = first.sample_id or f"entry {first.id}"
            # The id is the name of a file in the archive.
            sample_id = _ODD.sub("_", sample_id)[:200]
            while (sample_id, epoch) in names:  # of another run
                sample_id += "'"
            names.add((sample_id, epoch))
            sample = _eval_sample(story, sample_id, epoch)
            for entry in story.entries:
                judges[entry.judge] += 1
                if entry.reward is not None:
                    rewards.setdefault(entry.judge, []).append(entry.reward)
            archive.writestr(f"samples/{sample_id}_epoch_{epoch}.json", json.dumps(sample))
            kept = ("id", "epoch", "input", "target", "scores", "metadata")
            brief = {name: {**score, "metadata": {}} for name, score in sample["scores"].items()}
            summaries.append({**{key: sample[key] for key in kept}, "scores": brief, "completed": True})
        began, ended = (datetime.datetime.fromtimestamp(of(recorded), datetime.timezone.utc) for of in (min, max))
        spec = {
            "created": began.isoformat(),
            "task": "qreward",
            "dataset": {"name": name, "samples": len(summaries)},
            "model": "policy",
            "config": {},
        }
        scores = [
            {"name": judge, "scorer": judge, "metrics": {"mean": {"name": "mean", "value": fmean(rewards[judge])}}}
            for judge in judges
            if judge in rewards
        ]
        results = {"total_samples": len(summaries), "completed_samples": len(summaries), "scores": scores}
        stats = {"started_at": began.isoformat(), "completed_at": ended.isoformat()}
        header = {"version": 2, "status": "success", "eval": spec, "results": results, "stats": stats}
        archive.writestr("_journal/start.json", json.dumps({"version": 2, "eval": spec, "plan": {}}))
        archive.writestr("summaries.json", json.dumps(summaries))
        archive.writestr("header.json", json.dumps(header))


def _eval_sample(story: Story, sample_id: str, epoch: int) -> dict[str, Any]:
    first = story.sample
    prompt = _turns(first.prompt)
    answer = {"role": "assistant", "content": first.response or "(not kept)", "source": "generate", "model": "policy"}
    metadata: dict[str, Any] = {"step": first.step, "group": first.group_id, "data_source": first.data_source}
    trained = story.trained.get(first.sample_id or "")
    if trained is not None:
        advantage = trained.advantage if trained.advantage is not None and math.isfinite(trained.advantage) else None
        metadata |= {"advantage": advantage, "masked": trained.masked}
    scores = {
        entry.judge: {
            "value": entry.reward,
            "explanation": entry.rationale or entry.detail or None,
            "metadata": {"source": entry.source, "model": entry.model, "attempts": list(attempts)},
        }
        for entry, attempts in zip(story.entries, story.attempts, strict=True)
        if entry.reward is not None
    }
    failed = {entry.judge: f"{entry.cause}/{entry.reason}: {entry.detail}" for entry in story.entries if entry.cause}
    return {
        "id": sample_id,
        "epoch": epoch,
        "input": prompt,
        "target": first.ground_truth or "",
        "messages": [*prompt, answer],
        "output": {"model": "policy", "choices": [{"message": answer, "stop_reason": "stop"}]},
        "scores": scores,
        "metadata": {**metadata, **({"failed": failed} if failed else {})},
    }


def _turns(prompt: str | None) -> list[dict[str, str]]:
    known = ("system", "user", "assistant")
    turns = turns_of(prompt) if prompt is not None else [("user", "(not kept)")]
    return [
        {"role": role, "content": content} if role in known else {"role": "user", "content": f"{role}: {content}"}
        for role, content in turns
    ]


# Traces


def _send(stories: Iterator[Story]) -> None:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    except ImportError:
        remedy = 'pip install "qreward-plugins[opentelemetry]"'
        raise InputError(f"--otlp needs the SDK of OpenTelemetry and its exporter for HTTP: {remedy}") from None
    spans, tracers, exporter = InMemorySpanExporter(), TracerProvider(), OTLPSpanExporter()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    while part := list(itertools.islice(stories, _SENT_AT_ONCE)):
        for story in part:
            trace(story, tracers)
        # The SDK's batch processor would drop what its queue cannot hold, and hide errors.
        if exporter.export(spans.get_finished_spans()).name != "SUCCESS":
            remedy = "OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS say where it is"
            raise InputError(f"the collector did not take the traces; {remedy}")
        spans.clear()


def trace(story: Story, tracers: TracerProvider) -> None:
    """Make the trace of a sample: a span for it, one for each judge's call with its attempts below, and an event
    `gen_ai.evaluation.result` of the call for each reward. No text is sent: neither a prompt nor a reply.
    """
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

    tracer = tracers.get_tracer(_SCOPE)
    began = min(_began(entry) for entry in story.entries)
    first = story.sample
    trained = story.trained.get(first.sample_id or "")
    about = {
        "qreward.sample": first.sample_id,
        "qreward.run": first.run_id,
        "qreward.step": first.step,
        "qreward.group": first.group_id,
        "qreward.split": first.split,
        "qreward.data_source": first.data_source,
        "qreward.advantage": None if trained is None else trained.advantage,
    }
    root = tracer.start_span("reward", Context(), attributes=_known(about), start_time=_nanoseconds(began))
    for entry, attempts in zip(story.entries, story.attempts, strict=True):
        inside, starts = set_span_in_context(root, Context()), _began(entry)
        judged = {"qreward.judge": entry.judge, "qreward.reward": entry.reward, "qreward.cached": bool(entry.cached)}
        judged |= {"error.type": f"{entry.cause}/{entry.reason}" if entry.cause else None}
        call = tracer.start_span(
            f"judge {entry.judge}", inside, attributes=_known(judged), start_time=_nanoseconds(starts)
        )
        for attempt in attempts if not entry.cached else ():
            span = tracer.start_span(
                f"chat {entry.model}" if entry.model else "attempt",
                set_span_in_context(call, Context()),
                SpanKind.CLIENT,
                _known(_of_attempt(entry, attempt)),
                start_time=_nanoseconds(starts + attempt["started_s"]),
            )
            if attempt["result"] not in ("valid", "cancelled"):
                # Its problem is not sent, because it quotes the reply.
                span.set_status(Status(StatusCode.ERROR, attempt["result"]))
            span.end(_nanoseconds(starts + attempt["ended_s"]))
        if entry.cause:
            call.set_status(Status(StatusCode.ERROR, entry.reason or ""))
        ended = _nanoseconds(entry.recorded_at)
        if entry.reward is not None:
            result = {
                "gen_ai.evaluation.name": entry.judge,
                "gen_ai.evaluation.score.value": entry.reward,
                "gen_ai.response.model": entry.model,
            }
            call.add_event("gen_ai.evaluation.result", _known(result), ended)
        call.end(ended)
    root.end(_nanoseconds(max(entry.recorded_at for entry in story.entries)))


def _of_attempt(entry: Entry, attempt: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = attempt["tokens"]
    result = attempt["result"]
    return {
        "gen_ai.operation.name": "chat" if prompt or completion else None,
        "gen_ai.response.model": entry.model if result == "valid" else None,
        "gen_ai.usage.input_tokens": prompt or None,
        "gen_ai.usage.output_tokens": completion or None,
        "qreward.source": attempt["source"],
        "qreward.result": result,
        "qreward.hedge": bool(attempt.get("hedge")),
        "qreward.cost_usd": attempt["cost_usd"] or None,
        "error.type": result if result not in ("valid", "cancelled") else None,
    }


def _began(entry: Entry) -> float:
    return entry.recorded_at - entry.latency_s


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None and value != ""}


__all__ = ["command", "trace"]
