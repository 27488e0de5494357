"""Defines `ReplicaState`: the state of one replica, as its pool reports it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["starting", "up", "draining", "updating", "asleep", "stale", "down", "failed", "stopped"]
"""`draining`: it ends its calls and gets no more. `updating`: it gets other weights. `asleep`: its devices are free.
`stale`: it runs without the weights of the pool, which came from memory. `down`: it ended, and is started again.
`failed`: it ended too often."""


@dataclass(frozen=True)
class ReplicaState:
    """The state of one replica. `url` is "" while its server does not run. `restarts` counts all restarts so far.

    `version` and `identity` are those of its weights (`Weights`). `ticket` numbers the times that it was drained;
    `abort`: its calls are to be asked again elsewhere, not to be awaited. `last`: no replica will have its weights when
    it has drained, so groups that they have begun to judge end there first (`Gate`).
    """

    number: int
    state: State = "starting"
    url: str = ""
    devices: str = ""
    restarts: int = 0
    problem: str = ""
    version: str = ""
    identity: str = ""
    ticket: int = 0
    abort: bool = False
    last: bool = False

    def as_mapping(self) -> dict[str, Any]:
        """Its fields as plain values."""
        return asdict(self)
