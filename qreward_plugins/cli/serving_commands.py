"""Defines the options of the commands that serve until they are stopped: `serve`, `serve-judge` and `judge-server`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .running import ERRORS, OUT, one_message, run


def _print_faults(wanted: bool) -> None:
    if wanted:
        from .judge_server import list_faults

        list_faults(OUT)
        raise typer.Exit


def serve_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration (YAML).")],
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need --token-env.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port; 0: any free one.", min=0, max=65535)] = 8080,
    token_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable with the token that callers send as a bearer token."),
    ] = None,
    drain: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Most seconds for samples under way when the server is stopped.", min=0),
    ] = 60.0,
    max_body_mb: Annotated[int, typer.Option(help="Largest body of a request, in MiB.", min=1, max=4096)] = 64,
    max_samples: Annotated[
        int, typer.Option(help="Most samples under way; more are refused with 429.", min=1, max=10_000_000)
    ] = 100_000,
) -> None:
    """Serve rewards over HTTP: one queue and one set of limits for every process that asks.

    POST /score takes the rows that `qreward score` reads, one or many. POST /slime, /openrlhf and /get_reward take what
    these programs send already. GET /healthz, /readyz and /metrics (Prometheus).

    A missing reward is an HTTP error with its cause, never a number. Ctrl-C or SIGTERM stops it: new samples are
    refused, and those under way end first.

    Exit codes: 0 stopped, and every sample had its outcome; 2 the input or the configuration has mistakes; 3 stopped
    before some samples had theirs.
    """
    with one_message(ERRORS):
        from .serve import ServeOptions, serve

        options = ServeOptions(host, port, token_env, drain, max_body_mb, max_samples)
        code = run(serve(config, options, OUT))
    raise typer.Exit(code)


def serve_judge_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration (YAML).")],
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Source to start; repeatable. Default: every one of kind replicas."),
    ] = None,
) -> None:
    """Start the servers of the sources of kind replicas, print their addresses, and supervise them.

    Trainings on this machine with the same source use these servers, and leave them running when they end. Ctrl-C or
    SIGTERM stops the servers that nobody else uses.

    Exit codes: 0 stopped; 2 the configuration has mistakes, or a server did not start.
    """
    with one_message(ERRORS):
        from .serve_judge import serve_judge

        code = run(serve_judge(config, tuple(source or ()), OUT, ERRORS))
    raise typer.Exit(code)


def judge_server_command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any free one.", min=0, max=65535)] = 8100,
    scorer: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function that scores a JudgeCall; file.py:function works too. Default: overlap with the reference.",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model to serve.")] = "judge",
    requests_per_minute: Annotated[float | None, typer.Option(help="Limit of requests per minute.")] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(help="Limit of tokens per minute.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Limit of requests in flight.", min=1)] = None,
    window: Annotated[
        float, typer.Option(metavar="SECONDS", help="Window that limits are counted over; rates are scaled to it.")
    ] = 60.0,
    latency: Annotated[float, typer.Option(help="Median latency in seconds.", min=0)] = 0.0,
    stragglers: Annotated[
        float, typer.Option(help="Share of answers that take ten times as long.", min=0, max=1)
    ] = 0.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND=RATE", help="Share of requests that meet a fault, e.g. error_500=0.05; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of latencies and faults.")] = 0,
    list_faults: Annotated[
        bool,
        typer.Option("--list-faults", help="List the kinds of faults and exit.", is_eager=True, callback=_print_faults),
    ] = False,
) -> None:
    """Serve a judge that behaves like a provider, with configured limits, latency and faults.

    It speaks every dialect of chat judges (/v1, and /v1beta for gemini) and takes plain samples (/score). Ctrl-C stops
    it and prints a report of all requests.
    """
    with one_message(ERRORS):
        from .judge_server import ServerOptions, build_server, serve

        options = ServerOptions(
            host=host,
            port=port,
            scorer=scorer,
            model=model,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            concurrency=concurrency,
            window_s=window,
            latency_s=latency,
            stragglers=stragglers,
            faults=tuple(fault or ()),
            seed=seed,
        )
        code = run(serve(build_server(options), options.model, OUT))
    raise typer.Exit(code)
