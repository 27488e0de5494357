"""Defines the options of the commands about rewards and steps: `score`, `calibrate`, `plan` and `journal`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .running import ERRORS, OUT, one_message, run


def score_command(
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
    with one_message(ERRORS):
        from .score import prepare, score_rollouts

        code = run(score_rollouts(prepare(rollouts, config, out, ERRORS, overwrite=overwrite), OUT, ERRORS))
    raise typer.Exit(code)


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
    with one_message(ERRORS):
        from .calibrate import calibrate

        code = run(calibrate(config, samples, OUT, ERRORS, judge=judge, file=out))
    raise typer.Exit(code)


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
    with one_message(ERRORS):
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
        code = run(plan_step(options, OUT, ERRORS))
    raise typer.Exit(code)


def journal_command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Journal: the file that engine.journal.path names.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="Only this training step, the slowest first.")] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="How many of the latest steps are shown.")] = 10,
    verdicts: Annotated[int, typer.Option(metavar="N", min=0, help="How many verdicts are shown.")] = 8,
) -> None:
    """Show what a journal recorded, also while a run writes it.

    For each step: how many outcomes and failures, the mean score, and the slowest sample, how long it waited and on
    which source. For each source: answers, retries, time, tokens and cost. Then some verdicts, with the words of the
    judge.

    Exit codes: 0 shown; 2 there is no such journal, or nothing in it.
    """
    with one_message(ERRORS):
        from .journal import show_journal

        code = show_journal(path, OUT, step=step, steps=steps, verdicts=verdicts)
    raise typer.Exit(code)
