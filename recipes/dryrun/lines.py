"""The lines of a dry run: what was checked, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "FAIL", "note", "skipped"]
_STYLES: dict[Status, str] = {"ok": "green", "FAIL": "bold red", "note": "yellow", "skipped": "dim"}
_PROBLEM_CHARS = 600


@dataclass(frozen=True)
class Line:
    """One check. A `note` is worth a look and no fault; `skipped` was not checked. Only `FAIL` fails the dry run."""

    what: str
    status: Status
    found: str
    remedy: str = ""


def check(what: str, work: Callable[[], str | Line], remedy: str) -> Line:
    """Run a check. What it returns is what was found; whatever it raises fails it, with `remedy`."""
    try:
        found = work()
    # Frameworks raise anything for a configuration that they do not take, SystemExit included.
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split()) or "no message"
        if isinstance(error, ImportError):
            remedy = "install it, or run this in the environment of the framework"
        return Line(what, "FAIL", f"{type(error).__name__}: {message[:_PROBLEM_CHARS]}", remedy)
    return found if isinstance(found, Line) else Line(what, "ok", found)


def failed(lines: Iterable[Line]) -> int:
    """The number of lines that fail the dry run."""
    return sum(line.status == "FAIL" for line in lines)


def show(title: str, lines: Iterable[Line], out: Console) -> None:
    """Print the table."""
    table = Table("check", "", "found", title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for line in lines:
        found = Text(line.found)
        if line.remedy:
            found.append(f"\n-> {line.remedy}", style="bold")
        table.add_row(line.what, Text(line.status, style=_STYLES[line.status]), found)
    out.print(table)
