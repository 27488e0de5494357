"""What the benches share: their arguments, turns, tables and files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Arguments of a bench, which is described by the first line of its docstring; `--json` is among them."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE, too")
    return made


def turns(rounds: int, measures: Mapping[str, Callable[[], T]], console: Console) -> dict[str, list[T]]:
    """The measurements of each name. They take turns, so that other work on the machine slows all alike."""
    found: dict[str, list[T]] = {name: [] for name in measures}
    with console.status("") as status:
        for number in range(rounds):
            for name, measure in measures.items():
                status.update(f"round {number + 1} of {rounds}: {name}")
                found[name].append(measure())
    return found


def table(*columns: str, title: str | None = None) -> Table:
    """A table whose first column has names, and all others numbers."""
    made = Table(title=title)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=True)
    return made


def write(path: Path | None, found: Any) -> None:
    """Write what was found to the file of `--json`, if there is one."""
    if path is not None:
        path.write_text(json.dumps(_plain(found), indent=2) + "\n")


def _plain(found: Any) -> Any:
    if is_dataclass(found) and not isinstance(found, type):
        return asdict(found)
    if isinstance(found, Iterable) and not isinstance(found, (str, Mapping)):
        return [_plain(one) for one in found]
    return found
