"""Defines `SentCommand`: a command that a process has given to a pool, until it is answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from .pool import ChangeFailed


class SentCommand:
    """A command of this process that is under way. `repeats`: if the pool is lost, its successor gets it."""

    def __init__(
        self,
        message: Mapping[str, Any],
        result: asyncio.Future[dict[str, Any]],
        on_receiving: Callable[[list[int]], None],
        *,
        repeats: bool,
    ) -> None:
        self._message = message
        self._loop = result.get_loop()
        self.result = result
        self._on_receiving = on_receiving
        self.repeats = repeats
        self._sent = False
        self._sending = threading.Lock()

    def send(self, send: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Send it, unless this pool has it already. Return whether the pool has it."""
        with self._sending:
            self._sent = self._sent or send(self._message)
            return self._sent

    def unsend(self) -> None:
        """Note that the pool was lost."""
        with self._sending:
            self._sent = False

    def receive(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the pool about it, in its event loop. Any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._take, message)

    def _take(self, message: Mapping[str, Any]) -> None:
        if self.result.done():
            return
        if "receiving" in message:
            self._on_receiving(message["receiving"])
        elif "error" in message:
            error = message["error"]
            self.result.set_exception(ChangeFailed(error["problem"], replicas=error["replicas"], log=error["log"]))
        else:
            self.result.set_result(message["result"])
