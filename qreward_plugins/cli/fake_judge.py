"""`qreward fake-judge`: runs the judge server of `qreward_plugins.testing` in the foreground."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from ..testing import FaultKind, Faults, JudgeServer, JudgeServerError, Latency, Report, ServerLimits
from .console import OK, OUT, run, say, seconds, table

_SPREAD = 0.3


def _print_faults(wanted: bool) -> None:
    if wanted:
        shown = table("fault", "what happens", left=("fault",), folds=("what happens",))
        for kind in FaultKind:
            shown.add_row(str(kind), Text(kind.says))
        OUT.print(shown)
        raise typer.Exit


def command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any free one.", min=0, max=65535)] = 8100,
    model: Annotated[str, typer.Option(help="Name of the model to serve.")] = "judge",
    requests_per_minute: Annotated[float | None, typer.Option(help="Limit of requests per minute.")] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(help="Limit of tokens per minute.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Limit of requests in flight.", min=1)] = None,
    latency: Annotated[float, typer.Option(metavar="SECONDS", help="Median latency.", min=0)] = 0.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND=RATE", help="Share of requests that meet a fault, e.g. error_500=0.05; repeatable."),
    ] = None,
    list_faults: Annotated[
        bool,
        typer.Option("--list-faults", help="List the kinds of faults and exit.", is_eager=True, callback=_print_faults),
    ] = False,
) -> int:
    """Serve a judge that behaves like a provider, with configured limits, latency and faults.

    It speaks every dialect of chat judges (/v1, and /v1beta for gemini) and takes plain samples (/score). Ctrl-C stops
    it and prints a report of all requests.
    """
    try:
        server = JudgeServer(
            limits=ServerLimits(
                requests_per_minute=requests_per_minute,
                tokens_per_minute=tokens_per_minute,
                concurrency=concurrency,
            ),
            latency=Latency(median_s=latency, sigma=_SPREAD),
            faults=Faults(rates=dict(map(_rate, fault or ()))),
            models=(model,),
            host=host,
            port=port,
        )
    except ValueError as error:
        raise InputError(str(error).removeprefix("ServerLimits.")) from None
    return run(_serve(server, model))


async def _serve(server: JudgeServer, model: str) -> int:
    """Serve until cancelled, then print a report of all requests. Raises `InputError` if the address is in use."""
    try:
        server.start()
    except JudgeServerError as error:
        raise InputError(str(error)) from None
    with suppress(asyncio.CancelledError):
        # A space follows each URL, or the next character would be copied with it.
        say(OUT, f"fake judge at {server.base_url} (model {model}) and {server.score_url} ; stop it with Ctrl-C")
        await asyncio.get_running_loop().create_future()
    server.stop()
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(server.report()):
        facts.add_row(name, Text(value))
    OUT.print(facts)
    return OK


def _rate(text: str) -> tuple[str, float]:
    kind, _, rate = text.partition("=")
    try:
        return kind, float(rate)
    except ValueError:
        raise InputError(f"--fault {text}: write KIND=RATE, e.g. error_500=0.05") from None


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "requests", f"{report.requests:,} in {seconds(report.elapsed_s)}"
    yield "answered", f"{report.answered:,}"
    yield "statuses", _counts(report.statuses)
    yield "over a limit", _counts(report.violations_by_kind)
    yield f"most in {report.window_s:g} s", f"{report.max_requests_in_window:,}"
    yield "most in flight", f"{report.peak_concurrency:,}"
    yield "latency", f"p50 {seconds(report.latency_p50_s)}, p95 {seconds(report.latency_p95_s)}"
    yield "tokens", f"{report.prompt_tokens:,} of prompts, {report.completion_tokens:,} of completions"
    yield "faults played", _counts(report.faults)


def _counts(counts: Mapping[str, int] | Mapping[int, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts.items() if count) or "none"
