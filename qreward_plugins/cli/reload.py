"""`qreward reload --check`: shows what a reload would change, and what needs a restart."""

from __future__ import annotations

import secrets
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import Config, load_config
from ..engine.difference import Difference, difference
from ..errors import ConfigurationError
from ..judges import JudgeRouter
from .running import OK, say

NEEDS_RESTART = 1

_EFFECTS = {
    "at once": "changes at once",
    "new samples": "from the next sample on",
    "drains": "what is under way ends there first",
    "restart": "needs a restart",
}


def show_difference(before: Path, after: Path, out: Console) -> int:
    """Print what differs between two files. `-` is the standard input. Return `NEEDS_RESTART` if it cannot be reloaded.

    Raises `ConfigurationError` for mistakes in either.
    """
    found = difference(_loaded(before), _loaded(after))
    if not found:
        say(out, "no change")
        return OK
    out.print(_table(found))
    refused = found.refused
    if refused:
        names = ", ".join(change.path for change in refused)
        say(out, f"a reload would be refused as a whole: {names} needs a restart")
        return NEEDS_RESTART
    say(out, "a reload would apply this as a whole")
    return OK


def _loaded(path: Path) -> Config:
    name = "standard input" if str(path) == "-" else str(path)
    config = load_config("/dev/stdin" if str(path) == "-" else path, origin=name)
    try:
        JudgeRouter(config, key=secrets.token_bytes(16))
    except ConfigurationError as error:
        raise ConfigurationError(error.mistakes, origin=name) from None
    return config


def _table(found: Difference) -> Table:
    table = Table("what", "before", "after", "effect")
    for change in found.changes:
        # Instructions and names may look like markup.
        texts = map(Text, (change.path, change.before or "-", change.after or "-", _EFFECTS[change.effect]))
        table.add_row(*texts)
    return table
