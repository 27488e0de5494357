"""The tables of options in `docs/commands.md`, from the command line itself."""

from __future__ import annotations

import inspect
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typer.main import get_command

from qreward_plugins.cli.app import app


def options_of(name: str) -> str:
    """The arguments and options of a command as a table."""
    command = get_command(app).get_command(None, name)  # type: ignore[attr-defined, arg-type]
    types = get_type_hints(inspect.unwrap(command.callback))
    lines = ["| argument or option | default | meaning |", "|---|---|---|"]
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        value = f"`{parameter.metavar}`" if parameter.metavar else _value(types[parameter.name])
        if parameter.param_type_name == "argument":
            shown = value
        else:
            flags = sorted(parameter.opts, key=len, reverse=True)
            shown = ", ".join(f"`{flag}`" for flag in flags) + ("" if parameter.is_flag else f" {value}")
        lines.append(f"| {shown} | {_default(parameter)} | {parameter.help} |")
    return "\n".join(lines)


def _value(hint: Any) -> str:
    """What an option without a metavar takes: its choices, a number or a text."""
    for one in (hint, *get_args(hint)):
        if get_origin(one) is Literal:
            return ", ".join(f"`{choice}`" for choice in get_args(one))
    return "`NUMBER`" if hint in (int, float, int | None, float | None) else "`TEXT`"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if getattr(parameter, "is_flag", False):
        return "off"
    if parameter.default in (None, (), []):
        return ""
    return f"`{parameter.default:g}`" if isinstance(parameter.default, float) else f"`{parameter.default}`"
