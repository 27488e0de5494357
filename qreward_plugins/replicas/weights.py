"""Defines `Weights`, the weights that a pool serves, and `Update`, a change of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Mode = Literal["rolling", "together"]
"""`rolling`: one replica after the other. `together`: all at once, so that there is one version at a time."""
Drain = Literal["wait", "abort"]
"""What happens to calls under way at a replica that is drained: they end first, or they are asked again elsewhere."""


@dataclass(frozen=True)
class Weights:
    """What a pool serves: the model of the configuration (`revision` 0), or what an update brought.

    `version` is the name that its user gave. `identity` tells equal weights from others: a checksum that the server
    states, or a hash of the files; it is "" for the model of the configuration. `path` is the checkpoint, `files` the
    hash of its files; both are "" for weights that came from the memory of a trainer. `in_place`: servers loaded them
    while they ran; otherwise they are started with them. `revision` counts the updates of the pool.
    """

    version: str = ""
    identity: str = ""
    path: str = ""
    files: str = ""
    in_place: bool = False
    revision: int = 0

    @property
    def from_memory(self) -> bool:
        """Whether no file has them, so that a server that is started again cannot load them."""
        return self.revision > 0 and not self.path

    def as_mapping(self) -> dict[str, Any]:
        """Its fields as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Update:
    """An update of weights as it travels to the pool: from the checkpoint `path`, or from memory.

    From memory, `begin` has the body that joins each replica to the transfer (none: nothing is to be joined), and
    `receive` the bodies of the calls by which a replica receives tensors, in order. `within_s` is the time in seconds
    that calls under way have to end.
    """

    version: str
    path: str = ""
    begin: tuple[Mapping[str, Any], ...] = ()
    receive: tuple[Mapping[str, Any], ...] = ()
    mode: Mode = "rolling"
    drain: Drain = "wait"
    within_s: float = 600.0

    def as_mapping(self) -> dict[str, Any]:
        """Its fields as plain values."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Update:
        """Read what `as_mapping` returned, also after a way through JSON."""
        lists = {key: tuple(values[key]) for key in ("begin", "receive")}
        return cls(**{**values, **lists})
