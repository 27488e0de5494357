"""Rows as lines of JSON, in a way that loses none.

Files made by Python hold what the standard forbids: NaN, half a surrogate pair, integers of any length. They are read
with the standard library, which takes them all exactly. What is written is valid JSON for every reader, so NaN becomes
null; orjson writes it fast, and where it refuses a value the standard library does.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from ..errors import InputError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a file with the names of their lines ("line 7"); blank lines are left out. Raises `InputError`."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if line.strip():
                    where = f"line {number}"
                    yield where, _parsed(line, f"{path}, {where}")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def as_json(value: Any) -> bytes:
    """A value as one line of JSON. What JSON has no form for becomes text, bytes in base64. Raises `RecursionError`
    for a value that is nested hundreds of levels deep.
    """
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return json.dumps(_tamed(value), allow_nan=False).encode()


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode())
    except json.JSONDecodeError as error:
        problem = f"{error.msg.removesuffix(' at')} at column {error.colno}"
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} is not UTF-8"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError:
        # Python bounds the length of the integers that it reads.
        problem = "an integer with thousands of digits"
    raise InputError(f"{where}: not valid JSON ({problem})")


def _plain(value: Any) -> Any:
    """What stands in a row for a value of a type that JSON does not have."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return str(value)


def _tamed(value: Any) -> Any:
    """The value in the standard library's words: without NaN, keys that are no texts, and foreign types."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _tamed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tamed(item) for item in value]
    return _plain(value)
