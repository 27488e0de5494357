"""Defines `ReplicaState`: what a pool says of one of its replicas."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["starting", "up", "draining", "updating", "asleep", "stale", "down", "failed", "stopped"]
"""`draining`: it ends its calls and gets no more. `updating`: it gets other weights. `asleep`: its devices are free.
`stale`: it runs, but the weights of the pool came from memory, and it does not have them. `down`: it ended, and is
started again. `failed`: it ended too often."""


@dataclass(frozen=True)
class ReplicaState:
    """What is known of a replica. `url` is "" while its server does not run. `restarts` counts all restarts so far.

    `version` and `identity` are those of its weights (`Weights`). `ticket` numbers the times that it was drained;
    `abort`: its calls are to be asked again elsewhere, not to be awaited.
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

    def as_mapping(self) -> dict[str, Any]:
        """Its fields as plain values."""
        return asdict(self)
