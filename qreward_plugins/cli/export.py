"""`qreward export`: the samples of a journal for other tools: a table for pandas, and OpenTelemetry traces.

Traces are made from the journal, not while the run scores: so they cost the run nothing, show what the trainer made of
a sample, and can be sent later. The names of attributes are those of the semantic conventions for generative AI where
there are some.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ..errors import InputError
from ..files.tables import pyarrow_modules
from ..journal.entries import Entry
from ..journal.stories import Stories, Story
from ..system.output_files import check_new
from .console import ERRORS, OK, OUT, Journals, Overwrite, Where, number_of, replaced, say

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_BATCH = 1_000
_SENT_AT_ONCE = 100
_SCOPE = "qreward_plugins"


def command(
    paths: Journals,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A table: one row for each entry, with its texts.")
    ] = None,
    otlp: Annotated[
        bool, typer.Option("--otlp", help="Send a trace for each sample, to OTEL_EXPORTER_OTLP_ENDPOINT.")
    ] = False,
    where: Where = "1",
    overwrite: Overwrite = False,
) -> int:
    """Write the samples of journals to a table that pandas reads, or send them as traces.

    Texts are there if the journal has kept them (engine.journal.keep). Exit codes: 0 exported; 2 there is no such
    journal or no sample, FILE exists, or a package is missing.
    """
    if (parquet is not None) == otlp:
        raise InputError("name one of --parquet FILE and --otlp")
    if parquet is not None:
        check_new(parquet, ".parquet", overwrite=overwrite)
    with Stories(paths) as stories:
        count = stories.count(where)
        if not count:
            raise InputError(f"{' and '.join(paths)}: no sample to export")
        every = stories.every(where)
        with ERRORS.status(Text(f"exporting {number_of(count, 'sample')} ...")):
            if parquet is not None:
                _write_parquet(every, parquet)
            else:
                _send(every)
    to = f" to {parquet}" if parquet else ""
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
