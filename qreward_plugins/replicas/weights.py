"""Defines `Weights`, the weights that a pool serves, and `Update`, a change of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Mode = Literal["rolling", "together"]
"""`rolling`: one replica after the other. `together`: all at once, so that there is one version at a time."""
Drain = Literal["wait", "abort"]
"""What happens to the calls under way at a replica that is drained. `wait`: they end first. `abort`: they are cancelled
and sent again to another replica."""
_LONGEST_VERSION_CHARS = 200


@dataclass(frozen=True)
class Weights:
    """The weights that a pool serves: those of the configured model (`revision` 0), or of the last update.

    `version` is the name that the caller of the update gave. `identity` is equal for equal weights: a checksum that the
    server states, a hash of the files, or a random token for weights from memory without a checksum; it is "" for the
    configured model. `path` is the checkpoint, `files` the hash of its files; both are "" for weights that came from
    the memory of a trainer. `in_place`: servers load them while they run; otherwise they are started with them.
    `revision` counts the updates of the pool.
    """

    version: str = ""
    identity: str = ""
    path: str = ""
    files: str = ""
    in_place: bool = False
    revision: int = 0

    @property
    def from_memory(self) -> bool:
        """Whether they came from the memory of a trainer, so that a server that is started again cannot load them."""
        return self.revision > 0 and not self.path

    def as_mapping(self) -> dict[str, Any]:
        """Its fields as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Update:
    """An update of weights, as a process sends it to the pool: from the checkpoint `path`, or from memory.

    From memory, `begin` has the body that joins each replica to the transfer (none: nothing is to be joined), and
    `receive` the bodies of the calls by which a replica receives tensors, in order. `within_s` is the time in seconds
    that calls under way have to end. `groups`: the last replicas with their weights wait for the
    groups that these have begun to judge, and keep them if the groups do not end by then.
    """

    version: str
    path: str = ""
    begin: tuple[Mapping[str, Any], ...] = ()
    receive: tuple[Mapping[str, Any], ...] = ()
    mode: Mode = "rolling"
    drain: Drain = "wait"
    within_s: float = 600.0
    groups: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` for values that no pool can carry out."""
        check_choice("mode", self.mode, ("rolling", "together"))
        check_drain(self.drain, self.within_s)
        # Verdicts, logs and metrics carry it.
        version: object = self.version
        if not isinstance(version, str) or not version.isprintable() or len(version) > _LONGEST_VERSION_CHARS:
            problem = f"version is a printable text of at most {_LONGEST_VERSION_CHARS} characters"
            raise ValueError(f"{problem}, not {version!r:.80}")
        if self.receive and not version:
            raise ValueError("weights from memory need a `version`")

    def as_mapping(self) -> dict[str, Any]:
        """Its fields as plain values."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Update:
        """Make an update of what `as_mapping` returned, also of its copy in JSON."""
        lists = {key: tuple(values[key]) for key in ("begin", "receive")}
        return cls(**{**values, **lists})


def check_drain(drain: object, within_s: object) -> None:
    """Raise `ValueError` for a way to drain that there is not, or a time that no drain can take."""
    check_choice("drain", drain, ("wait", "abort"))
    if isinstance(within_s, bool) or not isinstance(within_s, (int, float)) or not 0 < within_s < float("inf"):
        raise ValueError(f"within_s is a number of seconds above 0, not {within_s!r}")


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raise `ValueError` if `value` is none of the `known` ones."""
    if value not in known:
        raise ValueError(f"{name} is {' or '.join(known)}, not {value!r}")
