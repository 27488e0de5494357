"""`qreward serve`: runs the reward server until it is stopped, then lets the samples under way end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config.load import without_colocated
from ..engine import RewardEngine
from ..errors import ConfigurationError, InputError, QRewardError
from ..secrets import one_line
from ..server.server import RewardServer
from .console import OK, OUT, REWARDS_MISSING, run, say
from .engines import load_own, mistakes_in, open_engine

_LINE_CHARS = 1_000
_NO_PHASES = "a reward server does not know when the trainings that ask it train, so its servers would never sleep."
_INSTEAD = "Give the training this file instead of the server's address, or give the judge devices of its own."


def command(
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
) -> int:
    """Serve rewards over HTTP: one queue and one set of limits for every process that asks.

    POST /score takes the rows that `qreward score` reads, one or many. POST /slime, /openrlhf and /get_reward take what
    these programs send already. GET /healthz, /readyz, /metrics (Prometheus).

    A missing reward is an HTTP error with its cause, never a number. Ctrl-C or SIGTERM stops it: new samples are
    refused, and those under way end first.

    Exit codes: 0 stopped, and every sample had its outcome; 2 the input or the configuration has mistakes; 3 stopped
    before some samples had theirs; 130 ended by a second Ctrl-C with samples under way.
    """
    token = os.environ.get(token_env) if token_env else None
    if token_env and not token:
        raise InputError(f"--token-env {token_env}: this environment variable is not set; set it to a long random text")
    return run(_serve(config, drain, host=host, port=port, token=token))


async def _serve(path: Path, drain_s: float, **options: Any) -> int:
    """Serve until cancelled, with `options` of the `RewardServer`. Return `REWARDS_MISSING` if samples were left
    without an outcome after `drain_s` seconds. Raises `ConfigurationError`, and `InputError` for an address that cannot
    be used.
    """
    with mistakes_in(path):
        config = without_colocated(load_own(path), _NO_PHASES, remedy=_INSTEAD)
    engine = open_engine(config, path)
    try:
        server = RewardServer(engine, **options)
        async with server, _reloaded_on_sighup(engine):
            with suppress(asyncio.CancelledError):
                say(OUT, f"reward server at {server.url}; stop it with Ctrl-C")
                await asyncio.get_running_loop().create_future()
            say(OUT, f"no new samples; those under way have {drain_s:g} s (Ctrl-C again ends at once)")
            left = await server.drain(drain_s)
            await engine.aclose()
    finally:
        await engine.aclose()
    counts = engine.statistics()
    say(OUT, f"{counts.scored:,} samples have a reward, {counts.failed_total:,} have none")
    return REWARDS_MISSING if left else OK


@asynccontextmanager
async def _reloaded_on_sighup(engine: RewardEngine) -> AsyncIterator[None]:
    """Reload the file of the configuration on each SIGHUP."""
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    async def reload() -> None:
        try:
            say(OUT, f"reloaded: {await engine.reload()}")
        except QRewardError as error:
            file, found = (
                (error.origin, error.mistakes) if isinstance(error, ConfigurationError) else ("the file", [error])
            )
            problem = one_line(" ".join(map(str, found)), _LINE_CHARS)
            say(OUT, f"{file} was not reloaded, and nothing has changed: {problem}")

    def begin() -> None:
        task = loop.create_task(reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, begin)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
