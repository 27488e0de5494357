"""`qreward judge-server`: the judge server of `qreward_plugins.testing` in the foreground."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ..errors import InputError
from ..sources.loading import PathLoader, load
from ..testing import Faults, JudgeServer, JudgeServerError, Latency, Report, ServerLimits, overlap_score, serve_forever


@dataclass(frozen=True)
class ServerOptions:
    """What the command line asks for; `faults` are texts KIND=RATE."""

    host: str
    port: int
    scorer: str | None
    model: str
    requests_per_minute: float | None
    tokens_per_minute: float | None
    concurrency: int | None
    latency_s: float
    stragglers: float
    faults: tuple[str, ...]
    seed: int


def serve(options: ServerOptions, out: Console) -> None:
    """Serve until SIGINT or SIGTERM, then print what the server saw. Raises `InputError` for impossible options."""
    try:
        server = JudgeServer(
            load(PathLoader(options.scorer), key="--scorer") if options.scorer else overlap_score,
            limits=ServerLimits(
                requests_per_minute=options.requests_per_minute,
                tokens_per_minute=options.tokens_per_minute,
                concurrency=options.concurrency,
            ),
            latency=Latency(median_s=options.latency_s, sigma=0.3, stragglers=options.stragglers),
            faults=Faults(rates=dict(_rate(text) for text in options.faults)),
            models=(options.model,),
            seed=options.seed,
            host=options.host,
            port=options.port,
        )
        server.start()
    except (ValueError, JudgeServerError) as error:
        raise InputError(str(error)) from None
    out.print(f"judge server at {server.base_url}, model {options.model}; stop it with Ctrl-C", highlight=False)
    try:
        serve_forever(server)
    finally:
        server.stop()
        out.print(_table(server.report()))


def _rate(text: str) -> tuple[str, float]:
    kind, _, rate = text.partition("=")
    try:
        return kind, float(rate)
    except ValueError:
        raise InputError(f"--fault {text}: write KIND=RATE, e.g. error_500=0.05") from None


def _table(report: Report) -> Table:
    table = Table(
        "requests", "answered", "429s", "violations", "most in a window", "peak in flight", "tokens", "p50", "p95"
    )
    table.add_row(
        str(report.requests),
        str(report.answered),
        str(report.throttled),
        str(report.violations_total),
        f"{report.max_requests_in_window} in {report.window_s:g} s",
        str(report.peak_concurrency),
        f"{report.prompt_tokens + report.completion_tokens:,}",
        _seconds(report.latency_p50_s),
        _seconds(report.latency_p95_s),
    )
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
