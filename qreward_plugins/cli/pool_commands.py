"""Defines the options of `qreward pool`: `status`, `sleep`, `wake` and `update`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .running import ERRORS, OUT, one_message, run

_Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration (YAML).")]
_Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--source", metavar="NAME", help="Source whose servers are meant; repeatable. Default: every one of replicas."
    ),
]
_Within = Annotated[float, typer.Option(metavar="SECONDS", help="Most seconds for the calls under way.", min=0.001)]


class _Mode(str, Enum):
    rolling = "rolling"
    together = "together"


class _Drain(str, Enum):
    wait = "wait"
    abort = "abort"


_Drained = Annotated[
    _Drain, typer.Option(help="Wait for the calls under way, or abort them; they are sent again then.")
]


def pool_status_command(
    config: _Config,
    source: _Sources = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show each server of the sources of kind replicas: its state, its weights, its load and its health.

    Requests, pending tokens, hit rate and health are those of all processes that use the servers, since each server was
    started. It starts no server, and finds those of this user on this machine, or on its Ray cluster.

    Exit codes: 0 shown; 2 the configuration has mistakes, or a source has no servers that run (the others are shown).
    """
    with one_message(ERRORS):
        from .pool import show_status

        code = run(show_status(config, tuple(source or ()), OUT, ERRORS, as_json=as_json))
    raise typer.Exit(code)


def pool_sleep_command(
    config: _Config,
    source: _Sources = None,
    level: Annotated[
        int, typer.Option(help="With sleep_mode: 1 keeps the weights in main memory, 2 discards them.", min=1, max=2)
    ] = 1,
    drain: _Drained = _Drain.wait,
    within: _Within = 600.0,
) -> None:
    """Free the devices of the servers, until they wake up. Calls that come meanwhile wait, in every process.

    Exit codes: 0 they sleep; 2 the configuration has mistakes, no servers run, or calls did not end in time. Ctrl-C
    ends only the wait.
    """
    with one_message(ERRORS):
        from .pool import sleep

        code = run(sleep(config, tuple(source or ()), OUT, ERRORS, level=level, drain=drain.value, within_s=within))
    raise typer.Exit(code)


def pool_wake_command(config: _Config, source: _Sources = None) -> None:
    """Let servers that sleep take calls again.

    Exit codes: 0 they are awake; 2 the configuration has mistakes, no servers run, or one could not be woken. Ctrl-C
    ends only the wait.
    """
    with one_message(ERRORS):
        from .pool import wake

        code = run(wake(config, tuple(source or ()), OUT, ERRORS))
    raise typer.Exit(code)


def pool_update_command(
    config: _Config,
    weights: Annotated[Path, typer.Option(metavar="PATH", help="The checkpoint: a folder, or a file for llama.cpp.")],
    source: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Source whose servers are meant. Default: the only one of kind replicas."),
    ] = None,
    version: Annotated[
        str, typer.Option(metavar="TEXT", help="Name of these weights in verdicts, the journal and metrics.")
    ] = "",
    mode: Annotated[_Mode, typer.Option(help="One server after the other, or all together.")] = _Mode.rolling,
    drain: _Drained = _Drain.wait,
    within: _Within = 600.0,
) -> None:
    """Give the servers of a source other weights while they run. Every process that uses them sees the update.

    Exit codes: 0 every server has them; 2 the configuration has mistakes, no servers run, or the update failed (the
    message says which servers, and what they serve). Ctrl-C ends only the wait.
    """
    with one_message(ERRORS):
        from .pool import update

        how = {"version": version, "mode": mode.value, "drain": drain.value, "within_s": within}
        code = run(update(config, source, weights, OUT, ERRORS, **how))
    raise typer.Exit(code)
