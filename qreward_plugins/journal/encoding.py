"""Encodes values as bytes: different values never give the same bytes, and all processes encode a value alike.

The usual encodings are not safe as keys. JSON writes NaN as it writes None, and the key 1 of a mapping as the key "1".
Pickles differ between equal values. A repr may hold an address, which differs from process to process. Here every value
is written with its type and its length. A value of an unknown type is refused.

Values that a function can tell apart give different bytes: 1, 1.0 and True, a list and a tuple, numpy's numbers and
Python's, two mappings whose keys are in another order. Sets are sorted, because their order differs between processes.
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

if TYPE_CHECKING:
    import numpy as np

_PLAIN_TYPES = (Decimal, uuid.UUID, datetime.date, datetime.datetime, datetime.time, datetime.timedelta)
"""Types whose `str` tells equal values from different ones, and is the same in every process."""

_IMAGE_MODES = frozenset({"1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16"})
"""Modes of Pillow's images whose pixels are all there is to see; those with a palette are refused."""


class Unencodable(Exception):
    """The value is of a type whose values cannot be told apart for certain, is too deep, or too large."""


def encoded(value: Any) -> bytes:
    """Encode `value`. Raises `Unencodable`, or whatever the methods of a foreign object raise."""
    return _Encoder().encoded(value)


class _Encoder:
    """Encodes one value. Refuses more than a million values and more than 64 levels, so also a value that contains
    itself.
    """

    def __init__(self) -> None:
        self._values_left = 1_000_000

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
        if kind in _PLAIN_TYPES:
            # `fold` distinguishes the two times that read alike when a clock is set back an hour.
            return _tagged(b"p", f"{kind.__name__} {value} {getattr(value, 'fold', '')}".encode())
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return _joined(b"c", [self._named(kind), *(self.encoded(item, depth + 1) for item in fields)])
        if kind.__module__ == "omegaconf.listconfig":
            return _joined(b"o", [self.encoded(item, depth + 1) for item in value])
        # By module name, because the core does not import numpy and Pillow.
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
