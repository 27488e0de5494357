"""`qreward serve-judge`: starts the servers of the sources of kind `replicas`, and keeps them running."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config import load_config
from ..errors import InputError
from ..sources import kind_of, open_source
from .running import OK, say
from .servers import ServerSource, said_of, topology_table


async def serve_judge(path: Path, names: Sequence[str], out: Console, errors: Console) -> int:
    """Start the servers of the sources `names` (default: all of kind `replicas`), and serve until cancelled.

    Raises `ConfigurationError`, `InputError` for a name that is not such a source, and `ReplicasNotStarted`.
    """
    config = load_config(path)
    known = [name for name, source in config.sources.items() if kind_of(source).has_servers]
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        missing = f"--source {unknown[0]}: it is no source" if unknown else f"{path}: there is no source"
        raise InputError(f"{missing} of kind replicas" + (f"; such sources: {', '.join(known)}" if known else ""))
    where = config.engine.shared_directory
    opened: list[Any] = [open_source(name, config.sources[name], shared_directory=where) for name in names or known]
    sources: list[ServerSource] = opened
    try:
        with errors.status("starting the servers ..."):
            await asyncio.gather(*(source.start() for source in sources))
        for source in sources:
            say(out, f"{source.name}: {said_of(source.spec)}")
            out.print(topology_table(source.replicas))
        say(out, "the servers run; stop them with Ctrl-C")
        with suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        say(out, "stopping the servers that nobody else uses ...")
    finally:
        await asyncio.gather(*(source.aclose() for source in sources))
    return OK
