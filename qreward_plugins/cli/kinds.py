"""`qreward kinds`: the kinds of sources and judges that a configuration may name, and where each comes from."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config.registry import Described, rooms
from .running import KIND_BROKEN, OK, say


def list_kinds(out: Console, *, as_json: bool) -> int:
    """Print every registered kind. Returns 0 if all can be used, else 1."""
    found = {room: kinds.described() for room, kinds in rooms.items()}
    if as_json:
        rows = [{"room": room, **_row(one)} for room, described in found.items() for one in described]
        out.file.write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    else:
        for room, described in found.items():
            out.print(_table(room, described))
        say(out, "A class that is not registered: kind: package.module:Class")
    return KIND_BROKEN if any(one.problem for described in found.values() for one in described) else OK


def _row(one: Described) -> dict[str, str]:
    return {
        "kind": one.name,
        "package": one.package,
        "version": one.version,
        "class": one.path,
        "description": one.description,
        "problem": one.problem,
    }


def _table(room: str, described: tuple[Described, ...]) -> Table:
    table = Table(title=room, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("kind", no_wrap=True)
    table.add_column("package")
    table.add_column("what it is", ratio=1)
    for one in described:
        text = Text(one.problem, style="red") if one.problem else Text(one.description)
        table.add_row(Text(one.name), Text(f"{one.package} {one.version}".strip()), text)
    return table
