"""Lists the commands. Each is a module of its own name: its options at the top, what it does below.

A module is imported when its command is called, so that `qreward --help` takes a third of a second.

Exit codes: 0 success; 1 a source gave no valid verdict, a kind cannot be used, a change needs a restart (`check`), or
a judge is below `--at-least` (`bench`); 2 the input or the configuration has mistakes; 3 some samples have no reward;
130 and 143 stopped by SIGINT (Ctrl-C) and SIGTERM. An error that the user can fix is one message without a traceback.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from .console import one_message, until_written

COMMANDS: Mapping[str, str] = {
    "init": "Write a configuration from a few questions, or flags.",
    "check": "Validate a configuration, ask every source, and try the judges.",
    "score": "Score a file of rollouts; resumable.",
    "bench": "Measure judges on answers that people have judged.",
    "calibrate": "Measure the scores of a reward model, for zscore.",
    "plan": "Simulate a step: its time, cost and bottleneck.",
    "serve": "Serve rewards over HTTP, to any number of processes.",
    "serve-judge": "Start the servers of the sources of kind replicas, and nothing else.",
    "journal": "Show the steps, the sample that each waited for, and the sources.",
    "sources": "Show the sources of a run that goes on; hold one, or release it.",
    "why": "Show why a sample got its reward: what was sent, what was replied, how it was read.",
    "replay": "Judge the samples of a journal again, with another configuration.",
    "diff": "Compare two judges on the same samples.",
    "audit": "Look for reward hacking, and for a judge that changes.",
    "export": "Write the samples of a journal for pandas or Inspect, or send traces.",
    "ui": "Show a run in the browser: trend, steps, samples.",
    "fake-judge": "Serve a judge for trials, with limits and faults.",
}
"""The commands, with a line about each. `serve-judge` is the function `command` of the module `serve_judge`."""


@functools.cache
def _command(name: str) -> Any:
    function = import_module(f".{name.replace('-', '_')}", __package__).command

    @functools.wraps(function)
    def ended(**options: Any) -> None:
        with one_message():
            code = function(**options)
        raise typer.Exit(code)

    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name)(ended)
    return get_command(alone)


class _Group(TyperGroup):
    """A group whose help imports no command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name) if cmd_name in COMMANDS else None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's, by which typer checks
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    name="qreward",
    cls=_Group,
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


def main() -> None:
    """Run the command line.

    Modules in the working directory can be imported, as with `python -m`, but installed packages come first.
    """
    with until_written():
        sys.path.append(os.getcwd())
        app(prog_name="qreward")
