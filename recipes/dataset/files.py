"""Files of rows: JSON lines and parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class DataError(Exception):
    """A file or an option has mistakes. The message says where, and what to do."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a JSONL or parquet file. Raises `DataError`."""
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file in it")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise DataError(f"{path}: must be JSON lines (.jsonl) or parquet (.parquet); convert it first")
    try:
        return _parquet_rows(path) if path.suffix == ".parquet" else list(_json_lines(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("parquet needs pyarrow: pip install 'qreward-plugins[parquet]'") from None
    return pyarrow


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    pyarrow = _pyarrow()
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: cannot be read as parquet: {str(error).splitlines()[0]}") from None
    return rows


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            try:
                # Files from Windows begin with a byte order mark.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                row = json.loads(text)
            except UnicodeDecodeError:
                raise DataError(f"{where}: is not UTF-8 text; convert the file first (iconv -t UTF-8)") from None
            except json.JSONDecodeError as error:
                problem = f"{error.msg}, at character {error.pos}"
                raise DataError(f"{where}: every line must be one JSON object, and this is none ({problem})") from None
            except RecursionError:
                raise DataError(f"{where}: is nested too deeply") from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: every line must be one JSON object, and this is a {type(row).__name__}")
            yield row


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path, *, overwrite: bool = False) -> None:
    """Write rows as parquet if the path ends so, otherwise as JSON lines; whole, or not at all. Raises `DataError`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.suffix == ".parquet":
                pyarrow = _pyarrow()
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), partial)
            else:
                with partial.open("w", encoding="utf-8") as lines:
                    lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            refuse_existing(path, overwrite=overwrite)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from None


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise `DataError` for a file that must not be replaced."""
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file in it")
    if not overwrite and os.path.lexists(path):
        raise DataError(f"{path}: exists; add --overwrite, or name another file")
