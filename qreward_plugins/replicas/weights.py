"""Defines `Weights`, the weights that a pool serves, and `Update`, a change of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .control import ServerFailed

Mode = Literal["rolling", "together"]
"""`rolling`: one replica after the other. `together`: all at once, so that there is one version at a time."""
_LONGEST_VERSION_CHARS = 200
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BESIDE = ("config.json", "generation_config.json", "tokenizer", "vocab", "merges", "special_tokens", "chat_template")
"""Beginnings of the names of other files that change what a server answers."""


@dataclass(frozen=True)
class Weights:
    """The weights that a pool serves: those of the configured model (`revision` 0), or of the last update.

    `version` is the name that the caller of the update gave. `identity` is equal for equal weights: a hash of the
    files, or a random token for weights from memory; it is "" for the configured model. `path` is the checkpoint, or ""
    for weights from the memory of a trainer. `in_place`: servers load them while they run; otherwise they are started
    with them. `revision` counts the updates of the pool.
    """

    version: str = ""
    identity: str = ""
    path: str = ""
    in_place: bool = False
    revision: int = 0

    @property
    def from_memory(self) -> bool:
        """Whether they came from the memory of a trainer, so that a server that is started again cannot load them."""
        return self.revision > 0 and not self.path


@dataclass(frozen=True)
class Update:
    """An update of weights: from the checkpoint `path`, or from memory.

    From memory, `begin` has the body that joins each replica to the transfer (none: nothing is to be joined), and
    `receive` the bodies of the calls by which a replica receives tensors, in order. `within_s` is the time in seconds
    that calls under way have to end, before they are cancelled and sent again.
    """

    version: str
    path: str = ""
    begin: tuple[Mapping[str, Any], ...] = ()
    receive: tuple[Mapping[str, Any], ...] = ()
    mode: Mode = "rolling"
    within_s: float = 600.0

    def __post_init__(self) -> None:
        """Raises `ValueError` for values that no pool can carry out."""
        if self.mode not in ("rolling", "together"):
            raise ValueError(f"mode is rolling or together, not {self.mode!r}")
        check_within(self.within_s)
        # Verdicts, logs and metrics carry it.
        version: object = self.version
        if not isinstance(version, str) or not version.isprintable() or len(version) > _LONGEST_VERSION_CHARS:
            problem = f"version is a printable text of at most {_LONGEST_VERSION_CHARS} characters"
            raise ValueError(f"{problem}, not {version!r:.80}")
        if self.receive and not version:
            raise ValueError("weights from memory need a `version`")


def check_within(within_s: object) -> None:
    """Raise `ValueError` for what is no time that calls may have to end."""
    if isinstance(within_s, bool) or not isinstance(within_s, (int, float)) or not 0 <= within_s < float("inf"):
        raise ValueError(f"within_s is a number of seconds from 0 on, not {within_s!r}")


def checkpoint_files(path: str, *, folder: bool) -> str:
    """Return a hash of the files of the checkpoint at `path`, by their names, sizes and times of change. It is equal
    for the same files. `folder`: the server loads no single file.

    Raises `ServerFailed` for a path without a checkpoint. It blocks for as long as the file system takes.
    """
    place = Path(path)
    try:
        if not place.exists():
            raise ServerFailed(f"{path} does not exist")
        if folder and not place.is_dir():
            # The server would take it for a name of the hub, and refuse it only after the replica was drained.
            raise ServerFailed(f"{path} is a file, and folders are loaded in place; name its folder, {place.parent}")
        found = [file for file in (sorted(place.iterdir()) if place.is_dir() else [place]) if file.is_file()]
        weights = {file.name for file in found if file.name.endswith(_WEIGHTS)}
        if not weights:
            raise ServerFailed(f"{path} holds no weights ({', '.join('*' + suffix for suffix in _WEIGHTS)})")
        digest = hashlib.blake2b(digest_size=16, person=b"qreward weights")
        for file in (file for file in found if file.name in weights or file.name.startswith(_BESIDE)):
            about = file.stat()
            digest.update(f"{file.name}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
    except OSError as error:
        raise ServerFailed(f"{error.filename or path}: {error.strerror or error}") from None
    return digest.hexdigest()
