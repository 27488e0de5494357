"""Computes the keys of recorded answers: a hash of everything that is sent to a source, one key for each source.

A key is derived from the request as the source would write it (`Source.question`), so it covers everything that is
sent. It also covers the source, how the judge reads the reply, and what the judge sees only as a placeholder, such as
the image of `[image]`. An image that is sent counts by a hash of its content. The last digits are for how the reply is
read, and all others for the question, so that `qreward replay` finds a reply that another judge can read.

The nonce of the fences is drawn per process and must not change the key. It does not occur in the sample's texts, so
each text is split at the nonce, and the parts are hashed.

A question that cannot be encoded safely has no key. Asking again costs one request; a wrong hit would give a wrong
reward.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import math
import struct
import uuid
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from ..samples.images import Image, is_image_part
from ..scheduling.calls import Call
from ..sources.base import Request, Source, content_apart

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


_PERSON = b"qreward key 3"
"""Change this whenever the content of keys changes, so that new keys do not match old answers."""

_QUESTION_BYTES = 14
_READING_BYTES = 6


def question_of(key: str) -> str:
    """The part of a key that does not depend on how the reply is read."""
    return key[: 2 * _QUESTION_BYTES]


def question_keys(call: Call[Any], sources: Mapping[str, Source]) -> dict[str, str]:
    """Return the key of each source's answer to `call`, by the source's name; 40 hexadecimal digits each.

    A source is missing if its question cannot be encoded safely, or if its answers must not be used again. The
    mapping is empty for a call without an identity, or without a request. Equal questions have equal keys, in every
    process. Raises nothing.
    """
    if not call.identity:
        return {}
    try:
        request = call.request(0)
        unseen = tuple(_attachments(request)) if request.messages else ()
        common, reading = encoded(unseen), encoded(call.identity)
    except Exception:
        # Methods of the values in a sample may raise anything.
        return {}
    keys = {}
    read = hashlib.blake2b(reading, digest_size=_READING_BYTES, person=_PERSON).hexdigest()
    for name in call.sources:
        asked = _asked(common, request, sources[name])
        if asked is not None:
            keys[name] = asked + read
    return keys


def _asked(common: bytes, request: Request, source: Source) -> str | None:
    try:
        question = _question(source, request)
        if question is None:
            return None
        digest = hashlib.blake2b(common, digest_size=_QUESTION_BYTES, person=_PERSON)
        digest.update(encoded(question))
    except Exception:
        return None
    return digest.hexdigest()


def _question(source: Source, request: Request) -> object | None:
    ask = getattr(source, "question", None)
    if ask is not None:
        question: object | None = ask(request)
        return question
    # A foreign source may lack `question`. Then everything in the request counts as sent, and the source's name counts,
    # too, because another source may answer differently.
    messages = [[(name, content_apart(text, request.nonce)) for name, text in m.items()] for m in request.messages]
    return (source.name, source.model, messages, dict(request.parameters), None if request.messages else request.sample)


def _attachments(request: Request) -> Iterator[Any]:
    """Yield the parts of the prompt and the response that are neither text nor sent, such as videos. The judge sees
    placeholders for them.
    """
    sends_images = any(not isinstance(message["content"], str) for message in request.messages)
    sample = request.sample
    for messages in (sample.messages, sample.prompt):
        for message in messages if isinstance(messages, (list, tuple)) else ():
            content = message.get("content") if isinstance(message, Mapping) else None
            for part in content if isinstance(content, (list, tuple)) else ():
                if not isinstance(part, Mapping) or isinstance(part.get("text"), str):
                    continue
                if not (sends_images and is_image_part(part)):
                    yield part
    if not sends_images:
        yield from sample.response_images
