"""`qreward serve`: runs the reward server until it is stopped, then lets the samples under way end."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..errors import InputError
from ..server import RewardServer
from .running import OK, REWARDS_MISSING, load_own, open_engine, say


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
    engine = open_engine(load_own(path), path)
    try:
        server = RewardServer(
            engine,
            host=options.host,
            port=options.port,
            token=token,
            max_body_bytes=options.max_body_mb * 2**20,
            max_samples=options.max_samples,
        )
        async with server:
            with suppress(asyncio.CancelledError):
                say(out, f"reward server at {server.url}; forms: {server.url}/openapi.json; stop it with Ctrl-C")
                await asyncio.get_running_loop().create_future()
            say(out, f"no new samples; those under way have {options.drain_s:g} s (Ctrl-C again ends at once)")
            left = await server.drain(options.drain_s)
            await engine.aclose()
    finally:
        await engine.aclose()
    counts = engine.statistics()
    say(out, f"{counts.scored:,} samples have a reward, {counts.failed_total:,} have none")
    return REWARDS_MISSING if left else OK


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise InputError(f"--token-env {variable}: this environment variable is not set; set it to a long random text")
    return token
