"""Defines the commands, their options and their exit codes.

Exit codes: 0 success; 1 a source gave no valid verdict (`check`), a kind cannot be used (`kinds`), or a
change needs a restart (`reload`); 2 the input or
the configuration has mistakes; 3 some samples have no reward (`score`); 130 and 143 stopped by SIGINT (Ctrl-C) and
SIGTERM. An error that the user can fix is one message without a traceback.
"""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .running import one_message, run, say, until_written, with_streams

app = typer.Typer(
    name="qreward",
    help="Rewards for RL post-training, scored over rate-limited judges.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_out, _errors = Console(), Console(stderr=True)


class _Framework(str, Enum):
    verl = "verl"
    slime = "slime"
    roll = "roll"
    none = "none"


class _Score(str, Enum):
    judge = "judge"
    reward_model = "reward-model"
    function = "function"
    mixture = "mixture"


def _print_version(wanted: bool) -> None:
    if wanted:
        from qreward_plugins import __version__

        typer.echo(f"qreward-plugins {__version__}")
        raise typer.Exit


def _print_faults(wanted: bool) -> None:
    if wanted:
        from .judge_server import list_faults

        list_faults(_out)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Rewards for RL post-training, scored over rate-limited judges."""


@app.command("init", short_help="Write a configuration: five questions, or flags.")
def init_command(
    framework: Annotated[
        _Framework | None,
        typer.Option(
            help="Framework that trains; none: files and Python. Default: the installed one, or verl.",
        ),
    ] = None,
    score: Annotated[
        _Score | None,
        typer.Option(
            help="What scores: a language model, a reward model, a Python function, or the sum of a function and a "
            "language model. Default: judge; with --function: function, or mixture if there is a --url.",
        ),
    ] = None,
    rubric: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What the judge looks at, or @FILE. Default: correctness and helpfulness."),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="Reward function; file.py:name works too. It is imported."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Base URL of the endpoint. Default: http://localhost:8000/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model. Default: the only one that the endpoint lists.")] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable that holds the API key. Default: chosen by the host."),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Protocol of the reward model's server. Default: the one of the server that answers."
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder of the reward model, for servers that render no conversation."),
    ] = None,
    rpm: Annotated[float | None, typer.Option(help="Requests per minute. Default: announced, or learned.")] = None,
    tpm: Annotated[float | None, typer.Option(help="Tokens per minute. Default: announced, or learned.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at once. Default: 64 at a local address, otherwise learned.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="File to write. Default: judges.yaml, or qreward.yaml for slime."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; take defaults.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Send nothing; validate the file only.")] = False,
) -> None:
    """Write a configuration with comments, check it, and print the line to train with.

    Asks five questions at a terminal: the framework, what scores a response, its endpoint, its limits, and the file. A
    flag answers its question. The endpoint is asked for its models, its dialect and its limits; if it does not answer
    yet, the file is validated without it.

    A key is never written: the file names the environment variable that holds it. The file is written whole or not at
    all, and an existing one is replaced only after a question, or with --overwrite.

    Exit codes: 0 written, and every source gave a valid verdict or was not asked; 1 written, and a source gave none; 2
    an answer is wrong or missing, and nothing was written; 130 stopped with Ctrl-C.
    """
    with one_message(_errors):
        from .init import InitOptions, init

        options = InitOptions(
            framework=None if framework is None else framework.value,
            score=None if score is None else score.value,
            url=url,
            model=model,
            api_key_env=api_key_env,
            protocol=protocol,
            chat_template=chat_template,
            rubric=rubric,
            function=function,
            rpm=rpm,
            tpm=tpm,
            concurrency=concurrency,
            out=out,
            yes=yes,
            overwrite=overwrite,
            offline=offline,
        )
        try:
            code = init(options, _out, _errors)
        except KeyboardInterrupt:
            say(_errors, "\nstopped; nothing was written")
            raise typer.Exit(130) from None
    raise typer.Exit(code)


@app.command(short_help="Validate a configuration, ask every source, and try the judges.")
def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration (YAML).")],
    rollouts: Annotated[
        Path | None,
        typer.Option(
            "--rollouts",
            "-r",
            metavar="FILE",
            help="Score the first rows of this .jsonl or .parquet file that go to each judge, instead of a built-in "
            "sample (What is 17 plus 25?).",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Most seconds to wait for the answer of a source.", min=0.1)
    ] = 30.0,
    offline: Annotated[
        bool, typer.Option("--offline", help="Validate only: send nothing, and need no server and no key.")
    ] = False,
) -> None:
    """Validate a configuration, then send live requests to every source of every judge.

    Shows the latency, the limits that the source announces, and the verdict. A language model also grades three pairs
    of a right answer and nonsense (six short requests), to test whether it can tell them apart. Nothing is written to a
    journal. If all is well, it ends with the line to train with.

    Exit codes: 0 every source gave a valid verdict and can judge; 1 a source did not; 2 the configuration has mistakes.
    """
    with one_message(_errors):
        from .check import check_config

        code = run(check_config(config, rollouts, _out, _errors, timeout_s=timeout, offline=offline))
    raise typer.Exit(code)


@app.command(short_help="Score a file of rollouts; resumable.")
def score(
    rollouts: Annotated[Path, typer.Argument(metavar="IN", help="Rows to score, .jsonl or .parquet.")],
    config: Annotated[Path, typer.Option("--config", "-c", metavar="CONFIG", help="The configuration (YAML).")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="OUT", help="File for the rows and their outcomes, .jsonl or .parquet."),
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it exists, and a column qreward of the input.")
    ] = False,
) -> None:
    """Score a file of rollouts: the same rows in the same order, with a column `qreward`.

    A row needs the column `response` (or solution_str, completion) and `messages` or `prompt`. `ground_truth` (or
    reward_model.ground_truth) is the reference, `data_source` chooses the judge, and the judge gets the rest as extras.

    Every verdict is stored in the journal of the configuration, or in OUT.journal, and is not paid for again. After a
    kill, the same command continues the run; with --overwrite, rows without a reward are tried again. Functions are
    called again, unless their source has a `version`. Delete the journal to judge all rows again.

    Exit codes: 0 every sample has a reward; 2 the input or the configuration has mistakes; 3 some samples have no
    reward; 130 stopped with Ctrl-C.
    """
    with one_message(_errors):
        from .score import prepare, score_rollouts

        code = run(score_rollouts(prepare(rollouts, config, out, _errors, overwrite=overwrite), _out, _errors))
    raise typer.Exit(code)


@app.command("calibrate", short_help="Measure the scores of a reward model, for zscore.")
def calibrate_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration (YAML).")],
    samples: Annotated[Path, typer.Argument(metavar="SAMPLES", help="Rows to score, .jsonl or .parquet.")],
    judge: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Judge to measure. Default: every one whose transform has zscore."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="File to write. Default: that of zscore.")
    ] = None,
) -> None:
    """Measure the scores of a reward model on rows like those of the training.

    Asks the sources of each judge of kind reward_model whose transform begins with zscore: FILE, and writes FILE: mean,
    standard deviation and quantiles of the scores before the transform, and the identity of the model and of what was
    sent. Rows are as for `score`. Draws a histogram.

    Exit codes: 0 every row has a score; 2 the input or the configuration has mistakes, or all scores are equal; 3 some
    rows have no score.
    """
    with one_message(_errors):
        from .calibrate import calibrate

        code = run(calibrate(config, samples, _out, _errors, judge=judge, file=out))
    raise typer.Exit(code)


@app.command(name="plan", short_help="Simulate a step: its time, cost and bottleneck.")
def plan_command(
    config: Annotated[Path, typer.Option("--config", "-c", metavar="CONFIG", help="The configuration (YAML).")],
    samples: Annotated[int, typer.Option("--samples", "-n", help="Samples in a step.", min=1, max=1_000_000)],
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="DIST",
            help="Lengths of rollouts in tokens: 800, lognormal:800:0.6 (mean, sigma), or file:rollouts.jsonl. "
            "Default: the journal's, or lognormal:800:0.6.",
        ),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds of an average request, without waiting: 3, or a=2,b=0.5, or a=0.02+0.001 (for a request, "
            "plus for each call in it). Default: the journal's, or 3 for a model, 0.5 for a scoring service and 0.1 "
            "for a function.",
        ),
    ] = None,
    data_source: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=SHARE]",
            help='Data source of the samples, which selects the judge; repeatable. Default: one of the route "*".',
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a question.", min=0, max=1_000_000)] = 200,
    verdict_tokens: Annotated[
        float | None,
        typer.Option(help="Tokens of a verdict. Default: the journal's, or 120.", min=0, max=100_000),
    ] = None,
    spread: Annotated[
        float | None,
        typer.Option(help="Sigma of the noise on latencies. Default: the journal's, or 0.3.", min=0, max=3),
    ] = None,
    stragglers: Annotated[
        float, typer.Option(help="Share of requests that take ten times as long.", min=0, max=1)
    ] = 0.01,
    errors: Annotated[float, typer.Option(help="Share of requests that fail.", min=0, max=0.9)] = 0.01,
    seeds: Annotated[int, typer.Option(help="Steps to simulate.", min=1, max=1000)] = 5,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the timeline of a step (.png, .svg, .pdf).")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the plan as JSON.")] = None,
) -> None:
    """Simulate a training step: its duration, its cost, what it waits for, and what would help most.

    The real scheduler runs in virtual time over simulated servers with the limits of the configuration. Nothing is
    sent, and nothing is written to a journal. If there is a journal, latencies are taken from its verdicts.

    Exit codes: 0 success; 2 the input or the configuration has mistakes.
    """
    with one_message(_errors):
        from .plan import PlanOptions, plan_step

        options = PlanOptions(
            config=config,
            samples=samples,
            tokens=tokens,
            latency=latency,
            data_sources=tuple(data_source or ()),
            prompt_tokens=prompt_tokens,
            verdict_tokens=verdict_tokens,
            spread=spread,
            stragglers=stragglers,
            errors=errors,
            seeds=seeds,
            plot=plot,
            json_file=json_file,
        )
        code = run(plan_step(options, _out, _errors))
    raise typer.Exit(code)


@app.command("judge-server", short_help="Serve a judge that behaves like a provider.")
def judge_server(
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
    with one_message(_errors):
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
        code = run(serve(build_server(options), options.model, _out))
    raise typer.Exit(code)


@app.command("serve", short_help="Serve rewards over HTTP, to any number of processes.")
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
    these programs send already. GET /healthz, /readyz, /metrics (Prometheus) and /openapi.json.

    A missing reward is an HTTP error with its cause, never a number. Ctrl-C or SIGTERM stops it: new samples are
    refused, and those under way end first.

    Exit codes: 0 stopped, and every sample had its outcome; 2 the input or the configuration has mistakes; 3 stopped
    before some samples had theirs.
    """
    with one_message(_errors):
        from .serve import ServeOptions, serve

        options = ServeOptions(host, port, token_env, drain, max_body_mb, max_samples)
        code = run(serve(config, options, _out))
    raise typer.Exit(code)


@app.command("serve-judge", short_help="Start the servers of the sources of kind replicas, and nothing else.")
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
    with one_message(_errors):
        from .serve_judge import serve_judge

        code = run(serve_judge(config, tuple(source or ()), _out, _errors))
    raise typer.Exit(code)


@app.command("reload", short_help="Show what a reload of the configuration would change.")
def reload_command(
    before: Annotated[Path, typer.Argument(metavar="OLD", help="The configuration that runs; -: standard input.")],
    after: Annotated[Path, typer.Argument(metavar="NEW", help="The configuration that shall run.")],
    check_only: Annotated[
        bool, typer.Option("--check", help="Show what a reload would change, and change nothing.")
    ] = False,
) -> None:
    """Show what a reload would change: at once, after what is under way has ended, or only with a restart.

    As in: git show HEAD:judges.yaml | qreward reload --check - judges.yaml

    An engine reloads by itself when its file changes (`engine.reload: on`), and `qreward serve` on SIGHUP.

    Exit codes: 0 a reload would be applied; 1 it would be refused, because something needs a restart; 2 a
    configuration has mistakes.
    """
    with one_message(_errors):
        from ..errors import InputError
        from .reload import show_difference

        if not check_only:
            raise InputError("add --check. An engine reloads by `engine.reload: on`, `qreward serve` on SIGHUP")
        code = show_difference(before, after, _out)
    raise typer.Exit(code)


@app.command("kinds", short_help="List the kinds of sources and judges, ours and others'.")
def kinds_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """List the kinds that a configuration may name, with the package that each comes from.

    Other packages register their kinds as entry points (qreward_plugins.sources, qreward_plugins.judges).

    Exit codes: 0 all of them can be used; 1 some cannot, and the table says why.
    """
    with one_message(_errors):
        from .kinds import list_kinds

        code = list_kinds(_out, as_json=as_json)
    raise typer.Exit(code)


def main() -> None:
    """Run the command line.

    Modules in the working directory can be imported, as with `python -m`, but installed packages come first.
    """
    sys.path.append(os.getcwd())
    with_streams()
    with until_written():
        app(prog_name="qreward")
