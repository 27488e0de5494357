"""Shares the limits of the server's engine with engines on other machines (`engine.shared: server`).

The server keeps nothing itself. It passes each report on to the keeper that its own engine reports to, so its samples
and those of the others come out of one limit.
"""

from __future__ import annotations

from typing import Any

from ..config import EngineConfig
from ..sharing import OpenedChannel, open_channel
from ..sharing.wire import load, read_report, write_answer

_UNSHARED = "this server shares no limits: set `engine.shared: machine` in its configuration"


class NotShared(Exception):
    """The server's engine has its limits for itself."""


class LimitsDoor:
    """Passes reports on to the keeper that `settings` selects."""

    def __init__(self, settings: EngineConfig) -> None:
        self._channel: OpenedChannel | None = open_channel(settings, relays=True)

    async def answer(self, body: bytes) -> dict[str, Any]:
        """Answer the message of a worker.

        Raises `NotShared`, `Unreadable`, and `KeeperError` if the keeper does not answer.
        """
        message = load(body)
        if self._channel is None:
            raise NotShared(_UNSHARED)
        if "status" in message:
            return {"status": await self._channel.describe()}
        # A configuration may name code to load, which a client must not make other processes do.
        report = read_report(message.get("report"))._replace(revision=None)
        answer = await self._channel.exchange(report)
        return {"answer": None if answer is None else write_answer(answer)}

    async def aclose(self) -> None:
        """Close the connection to the keeper. Idempotent."""
        if self._channel is not None:
            await self._channel.aclose()
