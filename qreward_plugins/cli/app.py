"""The commands, their options, and how they end.

Exit codes: 0 all is well; 1 a source did not answer (`check`); 2 the input or the configuration has mistakes; 3 some
samples have no reward (`score`); 130 stopped with Ctrl-C. Whatever goes wrong for a reason that the user can mend is
one message, without a traceback.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import QRewardError

app = typer.Typer(
    name="qreward",
    help="Rewards for RL post-training, scored over rate-limited judges.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_out, _errors = Console(), Console(stderr=True)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="The configuration (YAML).")],
) -> None:
    """Validate a configuration, then ask every source once: latency, announced limits, a sample verdict."""
    from .check import check_config

    raise typer.Exit(asyncio.run(check_config(config, _out)))


@app.command()
def score(
    rollouts: Annotated[Path, typer.Argument(help="Rows to score, .jsonl or .parquet.")],
    config: Annotated[Path, typer.Option("--config", "-c", help="The configuration (YAML).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the rows and their outcomes go, .jsonl or .parquet.")],
) -> None:
    """Score a file of rollouts. Stopped or killed, the same command goes on where it was and pays for nothing twice."""
    from .score import score_file

    raise typer.Exit(asyncio.run(score_file(rollouts, config, out, _out, _errors)))


@app.command("judge-server")
def judge_server(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any free one.")] = 8100,
    scorer: Annotated[
        str | None,
        typer.Option(help="package.module:function that scores a JudgeCall. Default: overlap with the reference."),
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model to serve.")] = "judge",
    requests_per_minute: Annotated[float | None, typer.Option(help="Limit of requests per minute.")] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(help="Limit of tokens per minute.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Limit of requests in flight.")] = None,
    latency: Annotated[float, typer.Option(help="Median latency in seconds.")] = 0.0,
    stragglers: Annotated[float, typer.Option(help="Share of answers that take ten times as long.")] = 0.0,
    fault: Annotated[list[str] | None, typer.Option(help="KIND=RATE, e.g. error_500=0.05; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of latencies and faults.")] = 0,
) -> None:
    """Serve a judge on loopback that behaves like a provider: limits, latency and faults as asked for."""
    from .judge_server import ServerOptions, serve

    options = ServerOptions(
        host=host,
        port=port,
        scorer=scorer,
        model=model,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrency=concurrency,
        latency_s=latency,
        stragglers=stragglers,
        faults=tuple(fault or ()),
        seed=seed,
    )
    serve(options, _out)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except QRewardError as error:
        _errors.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
