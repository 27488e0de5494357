"""Writes values as JSON and reads JSON, exactly: a value that JSON cannot hold raises `InputError`, and what Python's
decoder accepts but RFC 8259 does not is named.

orjson turns NaN into null and a dataclass into an object, so a server would score a different question. A value is
therefore first copied into JSON's types. A value that has no JSON type raises an `InputError` with its field and its
place. Two things are changed on purpose: keys that are numbers become texts, and a lone surrogate, which a policy's
tokens can form but UTF-8 cannot encode, becomes U+FFFD.

An image stays an `EncodedImage` in a body and becomes text only when the body is written.

What is read comes from a server (the reply of a service, the verdict of a model) and may be anything: `raw_decode` says
which flaw a value has, `too_deep` finds nesting that would exhaust the stack, and no integer takes quadratic time.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from ..errors import InputError, kind_of
from ..secrets import one_line
from .images.encoded import EncodedImage

MOST_VALUES = 1_000_000
"""Most values in one field. A part that occurs at several places counts at each of them."""
MOST_NESTING = 100
"""Deepest nesting of lists and mappings, in what is written and in what is read."""

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_KEY_CHARS = 40
_MAX_DIGITS = 64
_BRACKET = re.compile(r"[\[\]{}]")


def as_json(value: Any, field: str) -> Any:
    """Return `value` in JSON's types: None, booleans, numbers, texts, lists, mappings, and numpy arrays of numbers.

    Dates and UUIDs become their standard text. `field` is the value's name in messages. Raises `InputError` for NaN and
    infinity, integers beyond 64 bits, bytes, sets, objects, two keys that are the same text in JSON, more than
    `MOST_VALUES` values or `MOST_NESTING` levels, and values that contain themselves.
    """
    writer = _Writer()
    try:
        return writer.copy(value)
    except InputError as error:
        raise InputError(f"{field}{writer.place}: {error}") from None
    except Exception as error:
        raise InputError(f"{field}{writer.place}: it cannot be read ({kind_of(error)})") from None


def json_text(value: Any, field: str) -> str:
    """Return a value as JSON, and a text unchanged. Raises `InputError` as `as_json` does."""
    plain = as_json(value, field)
    return plain if isinstance(plain, str) else encoded(plain).decode()


def encoded(body: Any, *, image: Callable[[EncodedImage], str] = str) -> bytes:
    """Write what `as_json` returned, or a structure of such values, as UTF-8.

    `image` writes an image; the default encodes it, which takes a while. Raises TypeError for values of other types,
    and `InputError` for an image that cannot be sent.
    """

    def written(value: Any) -> Any:
        return image(value) if type(value) is EncodedImage else _listed(value)

    try:
        return orjson.dumps(body, option=_OPTIONS, default=written)
    except TypeError as error:
        refused = str(error.__cause__) if isinstance(error.__cause__, InputError) else ""
    if refused:
        raise InputError(refused)
    # Lone surrogates are rare, so texts are searched for them only after orjson has refused the body.
    return orjson.dumps(without_lone_surrogates(body), option=_OPTIONS, default=written)


class _Writer:
    def __init__(self) -> None:
        self._left = MOST_VALUES
        self._path: list[object] = []

    @property
    def place(self) -> str:
        """The place in the value that is being copied, such as `.steps[2]`."""
        shown = self._path[:8]
        text = "".join(f"[{key}]" if isinstance(key, int) else f".{one_line(str(key), _KEY_CHARS)}" for key in shown)
        return text + ("..." if len(self._path) > len(shown) else "")

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind is str or kind is bool or value is None or kind is EncodedImage:
            return value
        self._left -= 1
        if self._left < 0 or len(self._path) > MOST_NESTING:
            raise InputError("it is nested too deeply, contains itself, or holds more than a million values")
        if isinstance(value, int):
            return _integer(value)
        if isinstance(value, float):
            return _number(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, Mapping):
            return self._mapping(value)
        if kind is not memoryview and hasattr(value, "tolist") and hasattr(value, "shape"):
            return self._array(value)
        if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
            return self._list(value)
        if kind in (datetime.datetime, datetime.date, datetime.time):
            return value.isoformat()
        if kind is uuid.UUID:
            return str(value)
        raise InputError(f"it is of type {kind_of(value)}, which JSON does not have; write it as text or as a number")

    def _mapping(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for key, item in value.items():
            name = key if type(key) is str else self._key(key)
            if name in plain:
                raise InputError(f"two of its keys are written {one_line(name, _KEY_CHARS)!r} in JSON")
            self._path.append(name)
            plain[name] = self.copy(item)
            self._path.pop()
        return plain

    def _key(self, key: Any) -> str:
        plain = self.copy(key)
        if isinstance(plain, str):
            return plain
        if plain is None or isinstance(plain, (bool, int, float)):
            return orjson.dumps(plain).decode()
        raise InputError(f"a key is of type {kind_of(key)}; write a text")

    def _list(self, value: Sequence[Any]) -> list[Any]:
        plain: list[Any] = []
        for number, item in enumerate(value):
            self._path.append(number)
            plain.append(self.copy(item))
            self._path.pop()
        return plain

    def _array(self, value: Any) -> Any:
        items = value.tolist()
        if type(value).__module__ == "numpy" and value.dtype.kind in "mM":
            # numpy turns NaT into None, and times in nanoseconds into integers.
            raise InputError("it is a time of numpy; write it as text")
        plain = self.copy(items)
        # orjson writes a numpy float32 with as many digits as float32 needs. A Python float would get those of float64.
        is_native = type(value).__module__ == "numpy" and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
        return value if is_native else plain


def _integer(value: int) -> int:
    exact = int.__add__(value, 0)
    if not -(2**63) <= exact < 2**64:
        raise InputError("it is an integer beyond 64 bits, which many JSON parsers round; write it as text")
    return exact


def _number(value: float) -> float:
    exact = float.__add__(value, 0.0) if type(value) is not float else value
    if not math.isfinite(exact):
        raise InputError(f"it is {'NaN' if exact != exact else 'infinite'}, which JSON does not have")
    return value


def _listed(value: Any) -> Any:
    """Convert an array that orjson does not write (half precision, not contiguous) to a list."""
    tolist: Callable[[], Any] | None = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"Type is not JSON serializable: {kind_of(value)}")
    return tolist()


def without_lone_surrogates(value: Any) -> Any:
    """Replace every lone surrogate in `value` by U+FFFD, and every pair by its character."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {without_lone_surrogates(key): without_lone_surrogates(item) for key, item in value.items()}
    return [without_lone_surrogates(item) for item in value] if isinstance(value, (list, tuple)) else value


def too_deep(text: str) -> bool:
    """Whether lists and objects may be nested more than `MOST_NESTING` deep in any part of `text`.

    Brackets in strings count, too, so the answer may be true for a shallow text. It takes at most three passes.
    """
    if text.count("[") + text.count("{") <= MOST_NESTING:
        return False
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth = depth + 1 if bracket.group() in "[{" else max(0, depth - 1)
        if depth > MOST_NESTING:
            return True
    return False


class FlawError(Exception):
    """What Python's decoder accepts but RFC 8259 does not, as a phrase that continues a sentence: "the value" + " has a
    duplicate key".
    """


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise FlawError("has a duplicate key")
    return made


def _constant(name: str) -> float:
    raise FlawError(f"holds {name}, which is not JSON")


def _whole(digits: str) -> int | float:
    # The conversion takes quadratic time, and Python refuses it above 4,300 digits. No score is that large.
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


_STRICT = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_constant, parse_int=_whole)
_LENIENT = json.JSONDecoder(parse_int=_whole)


def raw_decode(text: str, start: int) -> tuple[Any, int, str]:
    """Parse the JSON value at `start`. Return it, its end, and its flaw (`FlawError`), "" if it has none.

    Raises what `JSONDecoder.raw_decode` raises.
    """
    try:
        return *_STRICT.raw_decode(text, start), ""
    except FlawError as error:
        return *_LENIENT.raw_decode(text, start), str(error)
