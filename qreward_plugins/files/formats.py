"""Determines file formats from file names, and checks output paths."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..errors import InputError
from ..system.output_files import check_writable

Format = Literal["jsonl", "parquet"]

_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


def format_of(path: Path) -> Format:
    """Return the format of a file by the suffix of its name. Raises `InputError` for other suffixes."""
    kind = _FORMATS.get(path.suffix.lower())
    if kind is None:
        raise InputError(f"{path}: the name must end in .jsonl or .parquet")
    return kind


def check_output(out: Path, *, source: Path, overwrite: bool = False) -> None:
    """Check that `out` can be written from `source`.

    Raises `InputError` if the name, the folder or the combination of formats is invalid, or if `out` exists and
    `overwrite` is false.
    """
    kind = format_of(out)
    if kind == "parquet" and format_of(source) != "parquet":
        raise InputError(f"{out}: parquet output needs parquet input, whose column types it keeps; write to .jsonl")
    check_writable(out)
    if out.resolve() == source.resolve():
        raise InputError(f"{out}: is the input itself; name another file")
    if out.exists() and not overwrite:
        raise InputError(
            f"{out}: exists; name another file, or replace it with --overwrite (verdicts from its journal are free)"
        )
