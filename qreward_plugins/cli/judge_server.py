"""`qreward judge-server`: runs the judge server of `qreward_plugins.testing` in the foreground."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import ConfigurationError, InputError
from ..secrets import Redactor
from ..system.functions import Function, PathLoader, load
from ..testing import FaultKind, Faults, JudgeServer, JudgeServerError, Latency, Report, ServerLimits, overlap_score
from .figures import seconds
from .running import OK, say

_SPREAD = 0.3


@dataclass(frozen=True)
class ServerOptions:
    """The options of the command; `faults` are texts KIND=RATE."""

    host: str
    port: int
    scorer: str | None
    model: str
    requests_per_minute: float | None
    tokens_per_minute: float | None
    concurrency: int | None
    window_s: float
    latency_s: float
    stragglers: float
    faults: tuple[str, ...]
    seed: int


def build_server(options: ServerOptions) -> JudgeServer:
    """Make the server, without starting it. Raises `InputError` for invalid options."""
    try:
        return JudgeServer(
            _scorer(options.scorer) if options.scorer else overlap_score,
            limits=ServerLimits(
                requests_per_minute=options.requests_per_minute,
                tokens_per_minute=options.tokens_per_minute,
                concurrency=options.concurrency,
                window_s=options.window_s,
            ),
            latency=Latency(median_s=options.latency_s, sigma=_SPREAD, stragglers=options.stragglers),
            faults=Faults(rates=dict(_rate(text) for text in options.faults)),
            models=(options.model,),
            seed=options.seed,
            host=options.host,
            port=options.port,
        )
    except ValueError as error:
        raise InputError(str(error)) from None


async def serve(server: JudgeServer, model: str, out: Console) -> int:
    """Serve until cancelled, then print a report of all requests. Raises `InputError` if the address is in use."""
    try:
        server.start()
    except JudgeServerError as error:
        raise InputError(str(error)) from None
    with suppress(asyncio.CancelledError):
        # A space follows each URL, or the next character would be copied with it.
        say(out, f"judge server at {server.base_url} (model {model}) and {server.score_url} ; stop it with Ctrl-C")
        await asyncio.get_running_loop().create_future()
    server.stop()
    out.print(_report_table(server.report()))
    return OK


def list_faults(out: Console) -> None:
    """Print every kind of fault with its effect."""
    table = Table("fault", "what happens", box=None, pad_edge=False)
    for kind in FaultKind:
        table.add_row(str(kind), Text(kind.says))
    out.print(table)


def _scorer(path: str) -> Function:
    if ":" not in path:
        raise InputError(f"--scorer {path}: write package.module:function or path/to/file.py:function")
    try:
        return load(PathLoader(path), key="--scorer")
    except ConfigurationError as error:
        raise InputError(f"--scorer {path}: {error.mistakes[0].problem}") from None


def _rate(text: str) -> tuple[str, float]:
    kind, _, rate = text.partition("=")
    try:
        return kind, float(rate)
    except ValueError:
        raise InputError(f"--fault {text}: write KIND=RATE, e.g. error_500=0.05") from None


def _report_table(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in _facts(report):
        table.add_row(name, Text(value))
    return table


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
    if report.refused or report.abandoned:
        yield "not answered", _counts({"refused": report.refused, "client went away": report.abandoned})
    if report.scorer_errors_total:
        yield "scorer failed", f"{report.scorer_errors_total:,}, first with {Redactor().of(report.scorer_errors[0])}"


def _counts(counts: Mapping[str, int] | Mapping[int, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts.items() if count) or "none"
