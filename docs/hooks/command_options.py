"""Writes the options of each command into `docs/commands.md`, from the command line itself.

A page gets the table of a command where it has the comment `<!-- options: COMMAND -->`.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, get_type_hints

from typer.main import get_command

from qreward_plugins.cli.app import app

_MARK = re.compile(r"<!-- options: ([a-z-]+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each mark by the table of its command (a hook of MkDocs)."""
    return _MARK.sub(lambda found: options_of(found[1]), markdown)


def options_of(name: str) -> str:
    """The arguments and options of a command as a table."""
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    types = get_type_hints(inspect.unwrap(command.callback))
    lines = ["| argument or option | default | meaning |", "|---|---|---|"]
    for parameter in command.params:
        if parameter.name == "help":
            continue
        value = parameter.metavar or ("NUMBER" if types[parameter.name] in (int, float, float | None) else "TEXT")
        if parameter.param_type_name == "argument":
            shown = f"`{value}`"
        else:
            flags = sorted(parameter.opts, key=len, reverse=True)
            shown = ", ".join(f"`{flag}`" for flag in flags) + ("" if parameter.is_flag else f" `{value}`")
        lines.append(f"| {shown} | {_default(parameter)} | {parameter.help} |")
    return "\n".join(lines)


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if getattr(parameter, "is_flag", False):
        return "off"
    if parameter.default in (None, (), []):
        return ""
    return f"`{parameter.default:g}`" if isinstance(parameter.default, float) else f"`{parameter.default}`"
