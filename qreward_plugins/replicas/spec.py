"""Defines `PoolSpec`: everything that the servers of a pool are started with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .server_kinds import CHAT, Launch
from .topology import Topology
from .weights import Weights

STOP_WITHIN_S = 5.0
"""Default of `stop_within_s`, in seconds. Closing an engine takes 10 s at most."""


@dataclass(frozen=True)
class PoolSpec:
    """What the servers of a pool are started with. Times are seconds.

    `name` is that of the source. `restarts` is how often in a row a replica that dies is started again.
    `stop_within_s` is the time between SIGTERM and SIGKILL. `in_place`: servers load other weights while they run;
    otherwise they are started again with them. `sleep_mode`: servers free their devices by their own sleep; otherwise
    they are stopped for it. `directory` is where processes of a machine find the pool; default: that of
    `private_directory`. `api_key` is the key that the servers demand. The repr leaves it out, and the values of
    `environment` and the words of the command line, which may hold secrets, too.
    """

    name: str
    server: str
    model: str
    topology: Topology
    task: str = CHAT
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    command: tuple[str, ...] = field(default=(), repr=False)
    program: tuple[str, ...] = field(default=(), repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    start_within_s: float = 600.0
    stop_within_s: float = STOP_WITHIN_S
    restarts: int = 3
    in_place: bool = False
    sleep_mode: bool = False
    api_key: str = field(default="", repr=False)
    log_folder: str | None = None
    directory: str | None = None

    @property
    def file_name(self) -> str:
        """Its name, with only those characters that a file name and a command line carry everywhere."""
        return re.sub(r"[^A-Za-z0-9_.-]", "_", self.name)[:64]

    @property
    def key(self) -> str:
        """16 hexadecimal digits that identify it: equal pools have equal keys, in all processes."""
        return hashlib.blake2b(self.to_json(), digest_size=8, person=b"qreward pool").hexdigest()

    @property
    def digests(self) -> Mapping[str, str]:
        """A digest of each field, and of each of its topology, its arguments and its variables ("environment.HOME"):
        another process finds what differs, and no secret.
        """
        fields = asdict(self)
        fields |= fields.pop("topology")
        for name in ("arguments", "environment"):
            fields |= {f"{name}.{key}": value for key, value in fields.pop(name).items()}
        texts = {name: json.dumps(value, sort_keys=True).encode() for name, value in fields.items()}
        digests = {name: hashlib.blake2b(text, digest_size=8).hexdigest() for name, text in texts.items()}
        return {**digests, "name": self.name}

    def launch(self, name: str, host: str, port: int, weights: Weights | None = None) -> Launch:
        """Return what a server that lists `name` and listens on `host` and `port` is started with. `weights` that are
        not loaded in place take the place of the model's.
        """
        instead = "" if weights is None or weights.in_place else weights.path
        return Launch(
            model=self.model,
            weights=instead,
            name=name,
            host=host,
            port=port,
            tensor_parallel=self.topology.tensor_parallel,
            task=self.task,
            platform=self.topology.platform,
            arguments=self.arguments,
            command=self.command,
            program=self.program,
            in_place=self.in_place,
            sleep_mode=self.sleep_mode,
        )

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of requests to its servers: the key, if there is one."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def to_json(self) -> bytes:
        """Write it, secrets included; `from_json` reads it."""
        # Not orjson: arguments may hold numbers and keys that it does not write.
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes) -> PoolSpec:
        """Read what `to_json` has written."""
        values = json.loads(text)
        topology = Topology(**{**values["topology"], "devices": tuple(values["topology"]["devices"])})
        lists = {key: tuple(values[key]) for key in ("command", "program")}
        return cls(**{**values, **lists, "topology": topology})
