"""Reads and writes rows as lines of JSON, without losing any row.

Files made by Python may hold values that the JSON standard forbids: NaN, lone surrogates, integers of any length. The
standard library reads all of them exactly. Output is valid JSON for every reader, so NaN becomes null. orjson writes it
because it is fast; the standard library writes the values that orjson rejects.
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
    """Yield the value of each line with the line's name ("line 7"), without blank lines. Raises `InputError`."""
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
    """Encode a value as one line of JSON. Types that JSON lacks become text, bytes become base64.

    Raises `RecursionError` for a value that is nested hundreds of levels deep.
    """
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return json.dumps(_tamed(value), allow_nan=False).encode()


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode().rstrip("\r\n"))
    except json.JSONDecodeError as error:
        problem = f"{error.msg.removesuffix(' at')} at column {error.colno}"
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} is not UTF-8"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError:
        # Python limits the length of integers that it parses.
        problem = "an integer with thousands of digits"
    raise InputError(f"{where}: not valid JSON ({problem})")


def _plain(value: Any) -> Any:
    """Convert a value of a type that JSON lacks to text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return str(value)


def _tamed(value: Any) -> Any:
    """Convert a value for `json.dumps`: NaN to null, keys to text, and foreign types to text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _tamed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tamed(item) for item in value]
    return _plain(value)
