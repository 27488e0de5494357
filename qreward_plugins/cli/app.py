"""Lists the commands. Their options are in the modules `*_commands`, and what they do is in a module for each command.

Exit codes: 0 success; 1 a source gave no valid verdict (`check`), a kind cannot be used (`kinds`), or a change needs a
restart (`reload`); 2 the input or the configuration has mistakes; 3 some samples have no reward (`score`); 130 and 143
stopped by SIGINT (Ctrl-C) and SIGTERM. An error that the user can fix is one message without a traceback.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from .configuration_commands import check_command, init_command, kinds_command, reload_command
from .running import until_written, with_streams
from .scoring_commands import calibrate_command, journal_command, plan_command, score_command
from .serving_commands import judge_server_command, serve_command, serve_judge_command

app = typer.Typer(
    name="qreward",
    help="Rewards for RL post-training, scored over rate-limited judges.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from qreward_plugins import __version__

        typer.echo(f"qreward-plugins {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Rewards for RL post-training, scored over rate-limited judges."""


for _name, _command, _short_help in (
    ("init", init_command, "Write a configuration: five questions, or flags."),
    ("check", check_command, "Validate a configuration, ask every source, and try the judges."),
    ("score", score_command, "Score a file of rollouts; resumable."),
    ("calibrate", calibrate_command, "Measure the scores of a reward model, for zscore."),
    ("plan", plan_command, "Simulate a step: its time, cost and bottleneck."),
    ("serve", serve_command, "Serve rewards over HTTP, to any number of processes."),
    ("serve-judge", serve_judge_command, "Start the servers of the sources of kind replicas, and nothing else."),
    ("reload", reload_command, "Show what a reload of the configuration would change."),
    ("journal", journal_command, "Show what the judges said, and which sample a step waited for."),
    ("kinds", kinds_command, "List the kinds of sources and judges, ours and others'."),
    ("judge-server", judge_server_command, "Serve a judge that behaves like a provider."),
):
    app.command(_name, short_help=_short_help)(_command)


def main() -> None:
    """Run the command line.

    Modules in the working directory can be imported, as with `python -m`, but installed packages come first.
    """
    sys.path.append(os.getcwd())
    with_streams()
    with until_written():
        app(prog_name="qreward")
