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
import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

from ..samples.images import Image, is_image_part
from ..scheduling.calls import Call
from ..sources.base import Request, Source

_PLAIN_TYPES = (Decimal, uuid.UUID, datetime.date, datetime.datetime, datetime.time, datetime.timedelta)
"""Types whose `str` is unique for each value and the same in every process."""


def encoded(value: Any) -> bytes:
    """Write a value as JSON, and what JSON has no type for under the name of its class.

    Raises TypeError or ValueError for a value that may be taken for another one, or that contains itself, and any
    exception of the methods of foreign objects in it.
    """
    return _encode(_text_keyed(value)).encode("utf-8", "surrogatepass")


_DEEPEST = 64
"""Levels of a value. One that contains itself must not use up the stack, which would end the process."""


def _text_keyed(value: Any, depth: int = 0) -> Any:
    """Write mappings whose keys are no texts as pairs: JSON writes 1 and "1" alike. Raises ValueError if too deep."""
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        pairs = [(key, _text_keyed(item, depth + 1)) for key, item in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("\0") for key in value)
        return dict(pairs) if plain else {"\0dict": [(_text_keyed(key, depth + 1), item) for key, item in pairs]}
    return [_text_keyed(item, depth + 1) for item in value] if isinstance(value, (list, tuple)) else value


def _named(value: Any) -> dict[str, Any]:
    kind = type(value)
    return {f"\0{kind.__module__}.{kind.__qualname__}": _text_keyed(_contents(value, kind))}


_encode = json.JSONEncoder(default=_named, separators=(",", ":"), ensure_ascii=False).encode


def _contents(value: Any, kind: type) -> Any:
    if kind is bytes or kind is bytearray:
        return value.hex()
    if kind is set or kind is frozenset:
        return sorted(map(_encode, value))
    if kind is Image:
        return value.digest
    if kind in _PLAIN_TYPES:
        # `fold` distinguishes the two equal local times when a clock is set back an hour.
        return [str(value), getattr(value, "fold", 0)]
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(kind):
        return [getattr(value, field.name) for field in dataclasses.fields(kind)]
    # Recognized by module name, because the core does not import these. A masked array is of another module.
    if kind.__module__ == "omegaconf.listconfig":
        return list(value)
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        if value.dtype.kind in "biufmM" and value.dtype.itemsize <= 8:
            return [value.dtype.str, value.shape, value.tobytes().hex()]
        if value.dtype.kind in "OSU" and type(value.tolist()) is not kind:
            return [value.dtype.str, value.shape, value.tolist()]
    raise TypeError(kind)


_PERSON = b"qreward key 4"
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
        with suppress(Exception):
            question = sources[name].question(request)
            if question is not None:
                digest = hashlib.blake2b(common, digest_size=_QUESTION_BYTES, person=_PERSON)
                digest.update(encoded(question))
                keys[name] = digest.hexdigest() + read
    return keys


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
