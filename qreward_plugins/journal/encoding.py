"""Encodes values as bytes: different values have different bytes, and equal values have the same in every process.

The usual encodings are not safe for keys. JSON writes NaN and None alike, and the mapping keys 1 and "1", too. Pickles
of equal values may differ. A repr may hold a memory address, which differs between processes. This encoding writes each
value with its type and length, and rejects values of unknown types.

Values that a function can distinguish have different bytes: 1, 1.0 and True; a list and a tuple; numbers of numpy and
Python; mappings with another order of keys. Sets are sorted, because their order differs between processes.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import struct
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from ..samples.images import Image

if TYPE_CHECKING:
    import numpy as np

_PLAIN_TYPES = (Decimal, uuid.UUID, datetime.date, datetime.datetime, datetime.time, datetime.timedelta)
"""Types whose `str` is unique for each value and the same in every process."""

_IMAGE_MODES = frozenset({"1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16"})
"""Modes of Pillow images that their pixels describe completely; images with a palette are rejected."""


MOST_VALUES = 1_000_000
"""Most values in one, nested ones included. A list that contains another twice, 40 times over, would not end."""


class Unencodable(Exception):
    """The value has an unsupported type, is nested too deeply, or is too large."""


def encoded(value: Any) -> bytes:
    """Encode `value`. Raises `Unencodable`, and any exception of the methods of foreign objects in it."""
    return _Encoder().encoded(value)


class _Encoder:
    """Encodes one value. Rejects more than `MOST_VALUES` values or 64 levels, and so recursive values."""

    def __init__(self) -> None:
        self._values_left = MOST_VALUES

    def encoded(self, value: Any, depth: int = 0) -> bytes:
        self._values_left -= 1
        if depth > 64 or self._values_left < 0:
            raise Unencodable
        kind = type(value)
        if value is None:
            return b"N"
        if kind is bool:
            return b"T" if value else b"F"
        if kind is str:
            return _tagged(b"s", value.encode("utf-8", "surrogatepass"))
        if kind is int:
            return _tagged(b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        if kind is float:
            return b"n" if math.isnan(value) else b"f" + struct.pack(">d", value)
        if kind is bytes or kind is bytearray:
            return _tagged(b"b" if kind is bytes else b"B", bytes(value))
        if kind is list or kind is tuple:
            return _joined(b"l" if kind is list else b"u", [self.encoded(item, depth + 1) for item in value])
        if kind is set or kind is frozenset:
            return _joined(b"e" if kind is set else b"E", sorted(self.encoded(item, depth + 1) for item in value))
        if kind is Image:
            return _tagged(b"g", value.digest.encode())
        if kind in _PLAIN_TYPES:
            # `fold` distinguishes the two equal local times when a clock is set back an hour.
            return _tagged(b"p", f"{kind.__name__} {value} {getattr(value, 'fold', '')}".encode())
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return _joined(b"c", [self._named(kind), *(self.encoded(item, depth + 1) for item in fields)])
        if kind.__module__ == "omegaconf.listconfig":
            return _joined(b"o", [self.encoded(item, depth + 1) for item in value])
        # Recognized by module name, because the core does not import numpy or Pillow.
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return self._numpy(value, depth)
        if kind.__module__.startswith("PIL.") and hasattr(value, "tobytes"):
            return self._image(value, depth)
        raise Unencodable

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> bytes:
        parts = [] if type(value) is dict else [self._named(type(value))]
        for key, item in value.items():
            parts += [self.encoded(key, depth + 1), self.encoded(item, depth + 1)]
        return _joined(b"m" if type(value) is dict else b"M", parts)

    def _numpy(self, value: np.ndarray[Any, Any] | np.generic, depth: int) -> bytes:
        kind = value.dtype.kind
        parts = [
            self._named(type(value)),
            _tagged(b"s", value.dtype.str.encode()),
            _tagged(b"s", repr(tuple(int(length) for length in value.shape)).encode()),
        ]
        if kind in "biufmM" and value.dtype.itemsize <= 8 and type(value).__name__ != "MaskedArray":
            parts.append(_tagged(b"b", value.tobytes()))
        elif kind in "OSU" and type(value.tolist()) is not type(value):
            parts.append(self.encoded(value.tolist(), depth + 1))
        else:
            raise Unencodable
        return _joined(b"a", parts)

    def _image(self, value: Any, depth: int) -> bytes:
        if value.mode not in _IMAGE_MODES or "transparency" in value.info:
            raise Unencodable
        pixels = (value.mode, tuple(value.size), value.tobytes())
        return _joined(b"I", [self._named(type(value)), self.encoded(pixels, depth + 1)])

    def _named(self, kind: type) -> bytes:
        return _tagged(b"k", f"{kind.__module__}.{kind.__qualname__}".encode())


def _tagged(tag: bytes, data: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(data), data)


def _joined(tag: bytes, parts: list[bytes]) -> bytes:
    return b"%b%d:%b" % (tag, len(parts), b"".join(parts))
