"""The key that a sample's verdict is found by: a hash of everything that the verdict depends on.

The encoding is our own because the usual ones are not safe as keys: JSON makes NaN and None the same, and 1 and "1" as
keys of a mapping; pickles differ between equal values; a repr may hold an address, so that every process would have its
own key. Here every value is written with its type and its length, and a value that cannot be written for certain gives
no key: a sample that is not cached costs one request, a wrong hit costs a wrong reward.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import struct
import uuid
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from ..samples import Sample

if TYPE_CHECKING:
    import numpy as np

_PLAIN_TYPES = (Decimal, uuid.UUID, datetime.date, datetime.time, datetime.timedelta)
"""Types whose `str` tells equal values from different ones, and is the same in every process."""


def sample_key(sample: Sample, fingerprint: str) -> str | None:
    """The key of a sample's verdict, 40 hexadecimal digits; None when a sample cannot be told for certain from others.

    Two samples have the same key when `fingerprint` (the judge's), messages, response, ground truth, data source and
    extras are equal. The sample's id, group, step and split play no part, nor does the order of the keys of a mapping.
    Numpy's scalars count as Python's. The key is the same in every process and version of Python.
    """
    parts = (fingerprint, sample.messages, sample.response, sample.ground_truth, sample.data_source, sample.extras)
    try:
        encoded = _Encoder().encoded(parts)
    except Exception:
        # Extras may be anybody's objects, whose methods may raise anything.
        return None
    return hashlib.blake2b(encoded, digest_size=20, person=b"qreward key 1").hexdigest()


class _Unencodable(Exception):
    pass


class _Encoder:
    """Writes one value. It gives up on values that are too deep or too many, as those that contain themselves are."""

    def __init__(self) -> None:
        self._values_left = 1_000_000

    def encoded(self, value: Any, depth: int = 0) -> bytes:
        self._values_left -= 1
        if depth > 64 or self._values_left < 0:
            raise _Unencodable
        if value is None:
            return b"N"
        if isinstance(value, bool):
            return b"T" if value else b"F"
        if isinstance(value, str):
            return _tagged(b"s", value.encode("utf-8", "surrogatepass"))
        if isinstance(value, int):
            return _tagged(b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        if isinstance(value, float):
            return b"n" if math.isnan(value) else b"f" + struct.pack(">d", value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return _tagged(b"b", bytes(value))
        if isinstance(value, Mapping):
            pairs = ((self.encoded(key, depth + 1), self.encoded(item, depth + 1)) for key, item in value.items())
            return _joined(b"m", [part for pair in sorted(pairs) for part in pair])
        if isinstance(value, Sequence):
            return _joined(b"l", [self.encoded(item, depth + 1) for item in value])
        if isinstance(value, Set):
            return _joined(b"e", sorted(self.encoded(item, depth + 1) for item in value))
        if isinstance(value, _PLAIN_TYPES):
            return _tagged(b"p", f"{type(value).__name__} {value}".encode())
        # Whoever has a value of numpy's has imported numpy; the core does not.
        if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
            return self._numpy(value, depth)
        raise _Unencodable

    def _numpy(self, value: np.ndarray[Any, Any] | np.generic, depth: int) -> bytes:
        kind = value.dtype.kind
        if value.shape == () and kind in "biufOSU":
            item = value.item()
            if type(item) is type(value):
                raise _Unencodable
            return self.encoded(item, depth + 1)
        if kind in "biuf" and value.dtype.itemsize <= 8:
            little = value.astype(value.dtype.newbyteorder("<"), copy=False)
            shape = repr(tuple(int(length) for length in value.shape))
            parts = (little.dtype.str.encode(), shape.encode(), little.tobytes())
            return _joined(b"a", [_tagged(b"b", part) for part in parts])
        if kind in "OSU":
            return _tagged(b"o", self.encoded(value.tolist(), depth + 1))
        if kind in "mM":
            return _tagged(b"t", f"{value.dtype.str} {value.astype('i8').tolist()}".encode())
        raise _Unencodable


def _tagged(tag: bytes, data: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(data), data)


def _joined(tag: bytes, parts: list[bytes]) -> bytes:
    return b"%b%d:%b" % (tag, len(parts), b"".join(parts))
