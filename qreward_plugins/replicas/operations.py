"""Defines `ServerOperations`: what a pool does at one running server by its control routes, with the checks.

They run on the machine of the server, because the files of a checkpoint are read there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ..system.threads import in_thread
from .checkpoint import CheckpointUnusable, model_checkpoint, read_checkpoint
from .control import Channel, Control, ControlFailed
from .spec import PoolSpec

SLEEP_WITHIN_S = 120.0
"""Seconds that a server has to free its devices. It copies the weights to main memory at some gigabytes a second."""
_UNNAMED = "default"
"""The version that servers state for the weights that they were started with."""


class ServerOperations:
    """The operations at the server at `url`. Every one returns plain values and raises `ControlFailed`."""

    def __init__(self, spec: PoolSpec, control: Control | None, url: str) -> None:
        self._spec = spec
        self._control = control
        self._channel = Channel(url, spec.headers)

    @classmethod
    def named(cls, name: str) -> Callable[..., Any]:
        """Return the method with this name. Raises `KeyError` for an unknown one."""
        known = (cls.check, cls.pause, cls.resume, cls.load, cls.receive, cls.sleep, cls.wake)
        return {method.__name__: method for method in known}[name]

    async def check(self, path: str) -> dict[str, Any]:
        """Check a checkpoint before any server loads it. Return the hash of its files (`files`)."""
        try:
            found = await in_thread(lambda: read_checkpoint(path))
        except CheckpointUnusable as error:
            raise ControlFailed(str(error)) from None
        if self._spec.in_place:
            if await in_thread(lambda: os.path.isfile(path)):
                # The server would take it for a name of the hub, and refuse it only after the replica was drained.
                problem = f"{path} is a file, and {self._spec.server} loads folders"
                raise ControlFailed(f"{problem}; name its folder, {os.path.dirname(path)}")
            model = await in_thread(lambda: model_checkpoint(self._spec.model))
            lacks = "" if model is None else found.lacks(model)
            if lacks:
                raise ControlFailed(f"{path} does not fit {self._spec.model}: {lacks}")
        return {"files": found.files}

    async def pause(self, within_s: float) -> None:
        """See `Control.pause`."""
        await self._required_control().pause(self._channel, within_s=within_s)

    async def resume(self) -> None:
        """See `Control.resume`."""
        await self._required_control().resume(self._channel)

    async def load(self, path: str, version: str, before: str) -> dict[str, Any]:
        """Load a checkpoint, reset the prefix cache, and check that the server has the new weights. Return their
        checksum as `identity`; "" if the server has none.

        `before` is the checkpoint of the earlier weights; "" if it is not known.
        """
        control, channel, within_s = self._required_control(), self._channel, self._spec.start_within_s
        old = await control.checksum(channel)
        version = version or _UNNAMED
        await control.load(channel, path, version, within_s=within_s)
        new = await self._finish_update(version)
        if new and new == old and before:
            was, now = await in_thread(lambda: (model_checkpoint(before), model_checkpoint(path)))
            if was is not None and now is not None and now.surely_differs(was):
                raise ControlFailed("the server says that it has loaded the weights, and has the earlier ones")
        return {"identity": new}

    async def receive(self, begin: Mapping[str, Any] | None, bodies: list[Any], version: str) -> dict[str, Any]:
        """Receive tensors from the memory of a trainer, then check and return as `load` does.

        A checksum that is the earlier one tells nothing: some servers always state the same. Verdicts of the earlier
        weights would be used for the new ones.
        """
        control, channel, within_s = self._required_control(), self._channel, self._spec.start_within_s
        old = await control.checksum(channel)
        if begin is not None:
            await control.join(channel, begin, within_s=within_s)
        await control.receive(channel, bodies, version, within_s=within_s)
        new = await self._finish_update(version)
        return {"identity": "" if new == old else new}

    async def sleep(self, level: int) -> None:
        """See `Control.sleep`. A trainer waits for it, so a server that hangs is not waited for as long as a start."""
        within_s = min(SLEEP_WITHIN_S, self._spec.start_within_s)
        await self._required_control().sleep(self._channel, level, within_s=within_s)

    async def wake(self, part: str) -> None:
        """See `Control.wake`."""
        await self._required_control().wake(self._channel, part, within_s=self._spec.start_within_s)

    async def _finish_update(self, version: str) -> str:
        """Reset the prefix cache, and check the version that the server states. Return its checksum, or ""."""
        control, channel = self._required_control(), self._channel
        await control.reset_cache(channel)
        stated = await control.version(channel)
        if stated is not None and stated != version:
            raise ControlFailed(f"it states the version {stated!r} after the update, not {version!r}")
        return await control.checksum(channel) or ""

    def _required_control(self) -> Control:
        if self._control is None:
            raise ControlFailed(f"{self._spec.server} has no routes to control it")
        return self._control
