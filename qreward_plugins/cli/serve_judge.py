"""`qreward serve-judge`: starts the servers of the sources of kind `replicas`, and keeps them running."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ..config import load_config
from .console import ERRORS, OK, OUT, run, say
from .servers import ServerSource, opened_servers, said_of, topology_table


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration (YAML).")],
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Source to start; repeatable. Default: every one of kind replicas."),
    ] = None,
) -> int:
    """Start the servers of the sources of kind replicas, print their addresses, and supervise them.

    Trainings on this machine with the same source use these servers, and leave them running when they end. Ctrl-C or
    SIGTERM stops the servers that nobody else uses.

    Exit codes: 0 stopped; 2 the configuration has mistakes, or a server did not start.
    """
    return run(_serve(config, tuple(source or ())))


async def _serve(path: Path, names: Sequence[str]) -> int:
    """Start the servers of the sources `names` (default: all of kind `replicas`), and serve until cancelled.

    Raises `ConfigurationError`, `InputError` for a name that is not such a source, and `ReplicasNotStarted`.
    """
    sources: list[ServerSource] = opened_servers(load_config(path), path, names)
    try:
        with ERRORS.status("starting the servers ..."):
            await asyncio.gather(*(source.start() for source in sources))
        for source in sources:
            say(OUT, f"{source.name}: {said_of(source.spec)}")
            OUT.print(topology_table(source.replicas))
        say(OUT, "the servers run; stop them with Ctrl-C")
        with suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        say(OUT, "stopping the servers that nobody else uses ...")
    finally:
        await asyncio.gather(*(source.aclose() for source in sources))
    return OK
