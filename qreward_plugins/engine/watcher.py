"""Watches the file of a configuration, and tells when it holds something else.

It watches the directories of the file and of what it links to, not the file: editors and Kubernetes replace the file or
a link on the way to it. A file that is missing, or still being written, is no news until it is there and stays the same
for `SETTLED_S`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import anyio
from anyio import to_thread

from ..errors import ConfigurationError, Mistake

SETTLED_S = 0.2
"""Seconds for which the file has to stay the same."""
LOOK_EVERY_S = 2.0
"""Seconds between two looks if the system reports nothing, as on some network file systems."""
_MOST_BYTES = 2**24


class Watch(Protocol):
    """Watches a file."""

    def __call__(self, file: str) -> AsyncGenerator[None, None]:
        """Yield once at the beginning, because the file may have changed since it was read, and each time that it holds
        something else than before. Cancelling it ends it.
        """
        ...


async def watch_file(file: str) -> AsyncGenerator[None, None]:
    """Yield once `file` is watched, and each time that its content has changed and settled.

    Raises `ConfigurationError` if the package `watchfiles` is not installed.
    """
    try:
        from watchfiles import awatch
    except ImportError:
        raise missing_package() from None
    known = await _settled(file)
    if known is not None:
        yield
    while True:
        folders = _folders(file)
        if not folders:
            await anyio.sleep(LOOK_EVERY_S)
            continue
        # A link may lead elsewhere after a change, so the folders are looked up again.
        watching = awatch(
            *folders,
            recursive=False,
            watch_filter=None,
            debounce=int(1000 * SETTLED_S),
            rust_timeout=int(1000 * LOOK_EVERY_S),
            yield_on_timeout=True,
        )
        async with aclosing(watching) as events:
            async for _ in events:
                now = await _settled(file)
                if now is not None and now != known:
                    known = now
                    yield
                if _folders(file) != folders:
                    break


def missing_package() -> ConfigurationError:
    """Return the error for `engine.reload` without `watchfiles`."""
    remedy = 'Install it: pip install "qreward-plugins[reload]".'
    return ConfigurationError([Mistake("engine.reload", "the package watchfiles is not installed.", remedy)])


async def _settled(file: str) -> bytes | None:
    """Return a hash of the file once it stays the same; None if it is not there."""
    seen = await to_thread.run_sync(_hash, file)
    while True:
        await anyio.sleep(SETTLED_S)
        again = await to_thread.run_sync(_hash, file)
        if again == seen:
            return seen
        seen = again


def _hash(file: str) -> bytes | None:
    try:
        with Path(file).open("rb") as opened:
            return hashlib.blake2b(opened.read(_MOST_BYTES)).digest()
    except OSError:
        return None


def _folders(file: str) -> list[str]:
    """Return the folders to watch: that of the file and that of what it links to, if they exist."""
    folders = {os.path.dirname(file), os.path.dirname(os.path.realpath(file))}
    return sorted(folder for folder in folders if os.path.isdir(folder))
