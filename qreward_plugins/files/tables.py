"""Reads tables of rollouts (JSON lines, JSON, Parquet), and writes JSON lines.

A file is written beside its place and renamed when it is complete, so that OUT never holds a part of the rows.
"""

from __future__ import annotations

import base64
import datetime
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from ..errors import InputError
from ..samples import Outcome, Scored
from ..system.output_files import check_writable

RESULT = "qreward"
"""Name of the column that holds the outcome."""


def to_result(outcome: Outcome) -> dict[str, Any]:
    """Convert an outcome to plain values.

    `outcome` is "scored", "floor" or "failed". `cause`, `reason` and `detail` say why a sample failed or why its reward
    is a floor. `reward` is None only for a failed sample.
    """
    verdict = outcome.verdict if isinstance(outcome, Scored) else None
    failed = outcome.failure
    told = outcome.verdict if isinstance(outcome, Scored) else outcome
    return {
        "reward": outcome.reward,
        "outcome": "failed" if verdict is None else "floor" if failed else "scored",
        "cause": failed.cause.value if failed else None,
        "reason": failed.reason if failed else None,
        "detail": writable(failed.detail) if failed else None,
        "components": {writable(name): value for name, value in verdict.components.items()} if verdict else {},
        "steps": [{"offset": offset, "score": score} for offset, score in verdict.steps] if verdict else [],
        "dense": [{"offset": offset, "reward": reward} for offset, reward in verdict.dense] if verdict else [],
        "correct": verdict.correct if verdict else None,
        "rationale": writable(verdict.rationale) if verdict else None,
        "judge": told.judge,
        "source": told.source,
        "model": writable(verdict.model) if verdict else None,
        "weight_version": writable(verdict.weight_version) if verdict else None,
        "attempts": told.attempts,
        "prompt_tokens": told.usage.prompt_tokens,
        "completion_tokens": told.usage.completion_tokens,
        "latency_s": told.latency_s,
        "cost_usd": told.cost_usd,
        "cached": verdict.cached if verdict else False,
        "cut": verdict.cut if verdict else False,
    }


def writable(text: str) -> str:
    """Replace lone surrogates, which a judge may write, and UTF-8 and Arrow cannot hold."""
    return text.encode("utf-8", "replace").decode()


def check_output(out: Path, *, source: Path, overwrite: bool = False) -> None:
    """Check that `out` can be written from `source`.

    Raises `InputError` if the name or the folder is invalid, or if `out` exists and `overwrite` is false.
    """
    if out.suffix.lower() not in (".jsonl", ".ndjson"):
        raise InputError(f"{out}: the name must end in .jsonl")
    check_writable(out)
    if out.resolve() == source.resolve():
        raise InputError(f"{out}: is the input itself; name another file")
    if out.exists() and not overwrite:
        raise InputError(
            f"{out}: exists; name another file, or replace it with --overwrite (verdicts from its journal are free)"
        )


def read_rows(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name of each row of a `.jsonl`, `.json` or `.parquet` file ("line 7"), its place for messages, and the
    row. Raises `InputError` for other suffixes, a file that cannot be read, and a row that is no object.
    """
    readers = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    read = readers.get(path.suffix.lower())
    if read is None:
        raise InputError(f"{path}: the name must end in .jsonl, .json or .parquet")
    for name, row in read(path):
        where = f"{path}, {name}"
        if not isinstance(row, dict):
            raise InputError(f"{where}: must be an object, not {type_of(row)}")
        yield name, where, row


def type_of(value: Any) -> str:
    """Name the type of a value in a message."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
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


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each item of the list in a JSON file with its name ("item 7"). Files of this name may hold JSON lines, too.
    Raises `InputError`.
    """
    try:
        whole = path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not whole.lstrip().startswith(b"["):
        yield from _read_jsonl(path)
        return
    for number, item in enumerate(_parsed(whole, str(path)), start=1):
        yield f"item {number}", item


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


_READ_ROWS = 64
"""Number of rows that are held as Python values at a time; rows may be large."""


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each row of a file with its name ("row 7"). Raises `InputError`."""
    arrow, parquet = pyarrow_modules()
    number = 0
    try:
        with path.open("rb") as file:
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=_READ_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except arrow.ArrowException as error:
        raise InputError(f"{path}: not a readable parquet file ({_first_line(error)})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or _first_line(error)})") from None
    except (ValueError, OverflowError) as error:
        # A timestamp may be too precise or too far away for Python.
        raise InputError(f"{path}: contains a value that Python cannot represent ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def pyarrow_modules() -> tuple[Any, Any]:
    """Return `pyarrow` and `pyarrow.parquet`. Raises `InputError` without them."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise InputError("parquet files need pyarrow: pip install 'qreward-plugins[parquet]'") from None
    return pyarrow, pyarrow.parquet


def partial_path(out: Path) -> Path:
    """Return the path of the rows of an unfinished run."""
    return out.with_name(out.name + ".partial")


@contextmanager
def open_writer(out: Path) -> Iterator[Callable[[Mapping[str, Any], Outcome], None]]:
    """Yield what writes a row with its outcome to `out`. `check_rollouts` must have accepted both.

    When the context exits without an error, the partial file replaces `out`. After an error the rows so far stay in the
    partial file, which is readable. Raises `InputError` if the partial file cannot be written or another run writes it.
    """
    partial = partial_path(out)
    with _open(partial, out) as file:

        def write(row: Mapping[str, Any], outcome: Outcome) -> None:
            with _write_errors(partial):
                file.write(as_json({**row, RESULT: to_result(outcome)}) + b"\n")
                file.flush()

        yield write
        with _write_errors(partial):
            os.fsync(file.fileno())
            os.replace(partial, out)


@contextmanager
def _open(partial: Path, out: Path) -> Iterator[BinaryIO]:
    """Open the partial file, locked and empty. It is truncated after locking, because another run may own it."""
    with _write_errors(partial):
        file = partial.open("ab")
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = "another run is writing it; wait for that run, or name another file"
            raise InputError(f"{out}: {problem}") from None
        except OSError:
            pass  # some network file systems do not support locks
        file.truncate(0)
        yield file
    finally:
        with suppress(OSError):  # everything important was flushed before
            file.close()


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
