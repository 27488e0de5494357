"""`qreward serve`: runs the reward server until it is stopped, then lets the samples under way end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..config.framework import without_colocated
from ..engine import RewardEngine
from ..errors import ConfigurationError, InputError, QRewardError
from ..secrets import one_line
from ..server.server import RewardServer
from .running import OK, REWARDS_MISSING, load_own, open_engine, say

_LINE_CHARS = 1_000
_NO_PHASES = "a reward server does not know when the trainings that ask it train, so its servers would never sleep."
_INSTEAD = "Give the training this file instead of the server's address, or give the judge devices of its own."


@dataclass(frozen=True)
class ServeOptions:
    """The options of the command. `drain_s` is in seconds, `max_body_mb` in MiB."""

    host: str
    port: int
    token_env: str | None
    drain_s: float
    max_body_mb: int
    max_samples: int


async def serve(path: Path, options: ServeOptions, out: Console) -> int:
    """Serve until cancelled. Return `REWARDS_MISSING` if samples were left without an outcome at the end.

    Raises `ConfigurationError`, and `InputError` for an unset token or an address that cannot be used.
    """
    token = _token(options.token_env)
    try:
        config = without_colocated(load_own(path), _NO_PHASES, remedy=_INSTEAD)
    except ConfigurationError as error:
        raise ConfigurationError(error.mistakes, origin=str(path)) from None
    engine = open_engine(config, path)
    try:
        server = RewardServer(
            engine,
            host=options.host,
            port=options.port,
            token=token,
            max_body_bytes=options.max_body_mb * 2**20,
            max_samples=options.max_samples,
        )
        async with server, _reloaded_on_sighup(engine, out):
            with suppress(asyncio.CancelledError):
                say(out, f"reward server at {server.url}; stop it with Ctrl-C")
                await asyncio.get_running_loop().create_future()
            say(out, f"no new samples; those under way have {options.drain_s:g} s (Ctrl-C again ends at once)")
            left = await server.drain(options.drain_s)
            await engine.aclose()
    finally:
        await engine.aclose()
    counts = engine.statistics()
    say(out, f"{counts.scored:,} samples have a reward, {counts.failed_total:,} have none")
    return REWARDS_MISSING if left else OK


@asynccontextmanager
async def _reloaded_on_sighup(engine: RewardEngine, out: Console) -> AsyncIterator[None]:
    """Reload the file of the configuration on each SIGHUP."""
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    async def reload() -> None:
        try:
            say(out, f"reloaded: {await engine.reload()}")
        except QRewardError as error:
            found = error.mistakes if isinstance(error, ConfigurationError) else [error]
            problem = one_line(" ".join(map(str, found)), _LINE_CHARS)
            say(out, f"not reloaded, and nothing has changed: {problem}")

    def begin() -> None:
        task = loop.create_task(reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, begin)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise InputError(f"--token-env {variable}: this environment variable is not set; set it to a long random text")
    return token
