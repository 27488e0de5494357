"""Checks that a checkpoint is complete and fits the model, and hashes its files.

A server that loads a broken checkpoint in place may lose the weights that it had. So the files are checked before
a replica is touched. Only headers and samples of the tensors are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BESIDE = ("config.json", "generation_config.json", "tokenizer", "vocab", "merges", "special_tokens", "chat_template")
"""Beginnings of the names of other files that change what a server answers."""
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_HEADER_BYTES = 100 * 2**20
_EDGE_BYTES = 65536
_SAMPLE_BYTES = 1024
_TIED = "lm_head.weight"
"""A tensor that checkpoints of models with tied embeddings may hold or leave out."""
_SHOWN = 3
"""Most names that a message lists."""


class CheckpointUnusable(Exception):
    """A checkpoint cannot be loaded. The message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """The hashes and tensors of a checkpoint.

    `files` is equal for the same files: a hash of names, sizes, times, and the first and last 64 KiB of each. `tensors`
    are dtype and shape by name; empty unless the files are safetensors. `content` is a hash of samples of the weights,
    without the times of the files.
    """

    files: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    content: str = ""

    def lacks(self, model: Checkpoint) -> str:
        """Return why a server of `model` cannot load these weights; "" if no reason is known."""
        if not (self.tensors and model.tensors):
            return ""
        missing = sorted(model.tensors.keys() - self.tensors.keys() - {_TIED})
        if missing:
            return f"it lacks {len(missing)} tensors of the model ({_listed(missing)})"
        for name, (_, shape) in self.tensors.items():
            theirs = model.tensors.get(name, ("", shape))[1]
            if theirs != shape:
                return f"its tensor {name} has the shape {list(shape)}, that of the model {list(theirs)}"
        return ""

    def surely_differs(self, model: Checkpoint) -> bool:
        """Whether its weights certainly differ from those of `model`."""
        return bool(self.content and model.content) and (
            self.tensors == model.tensors and self.content != model.content
        )


def read_checkpoint(path: str) -> Checkpoint:
    """Read the checkpoint at `path`: a folder, or one file. Raises `CheckpointUnusable`."""
    place = Path(path)
    try:
        found = sorted(place.iterdir()) if place.is_dir() else [place]
        found = [file for file in found if file.is_file()]
        weights = [file for file in found if file.name.endswith(_WEIGHTS)]
        if not place.exists():
            raise CheckpointUnusable(f"{path} does not exist")
        if not weights:
            raise CheckpointUnusable(f"{path} holds no weights ({', '.join('*' + suffix for suffix in _WEIGHTS)})")
        for file in weights:
            if file.stat().st_size == 0:
                raise CheckpointUnusable(f"{file} is empty")
        _check_indexes(place, {file.name for file in weights})
        digest = hashlib.blake2b(digest_size=16, person=b"qreward weights")
        for file in (file for file in found if file in weights or file.name.startswith(_BESIDE)):
            digest.update(_edges(file))
        safe = [file for file in weights if file.name.endswith(".safetensors")]
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        samples = {} if safe else {file.name: _edges(file, with_time=False) for file in weights}
        for file in safe:
            _read_tensors(file, tensors, samples)
    except OSError as error:
        raise CheckpointUnusable(f"{error.filename or path}: {error.strerror or error}") from None
    content = hashlib.blake2b(digest_size=16)
    for name in sorted(samples):
        content.update(name.encode() + b"\0" + samples[name])
    return Checkpoint(digest.hexdigest(), tensors, content.hexdigest())


def _edges(file: Path, *, with_time: bool = True) -> bytes:
    """Return name, size, time of change, and the first and last `_EDGE_BYTES` of a file, for a hash."""
    about = file.stat()
    with file.open("rb") as stream:
        head = stream.read(_EDGE_BYTES)
        stream.seek(max(0, about.st_size - _EDGE_BYTES))
        tail = stream.read(_EDGE_BYTES)
    return f"{file.name}\0{about.st_size}\0{about.st_mtime_ns if with_time else ''}\0".encode() + head + tail


def _check_indexes(place: Path, names: set[str]) -> None:
    for index in (place / name for name in _INDEXES):
        if not index.is_file():
            continue
        try:
            wanted = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise CheckpointUnusable(f"{index} cannot be read") from None
        missing = sorted(map(str, wanted - names))
        if missing:
            raise CheckpointUnusable(f"{place} lacks {_listed(missing)}, which its index names")


def _read_tensors(file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], samples: dict[str, bytes]) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= min(size - 8, _HEADER_BYTES):
            raise CheckpointUnusable(f"{file} is cut off or no safetensors file")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            spans = {name: (int(one["data_offsets"][0]), int(one["data_offsets"][1])) for name, one in header.items()}
            read = {name: (str(one["dtype"]), tuple(map(int, one["shape"]))) for name, one in header.items()}
            if any(not 0 <= first <= last for first, last in spans.values()):
                raise ValueError("an offset is before the one that it follows")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError):
            raise CheckpointUnusable(f"{file} is no safetensors file") from None
        end = 8 + length + max((last for _, last in spans.values()), default=0)
        if size != end:
            raise CheckpointUnusable(f"{file} is cut off: it has {size} bytes, its header says {end}")
        tensors.update(read)
        for name, (first, last) in spans.items():
            stream.seek(8 + length + max(first, (first + last - _SAMPLE_BYTES) // 2))
            samples[name] = stream.read(min(_SAMPLE_BYTES, last - first))


def model_checkpoint(model: str) -> Checkpoint | None:
    """Read the checkpoint of the configured model; None if its files are not on this machine, or cannot be read."""
    if not os.path.exists(model):
        return None
    try:
        return read_checkpoint(model)
    except CheckpointUnusable:
        return None


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
