"""Writes a configuration as YAML with the documentation of each key above it.

The comments are the docstrings of the models of this version.
"""

from __future__ import annotations

import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel

from .models import Config
from .registry import rooms

_WIDTH = 110
_INDENT = "  "


@dataclass(frozen=True)
class Suggestion:
    """A value that is written as a comment: the reader removes the `#` to set it."""

    value: Any


def commented_yaml(tree: Mapping[str, Any], *, heading: str, below: str = "") -> str:
    """Write `tree`, which must be valid (`load_config`); a `Suggestion` may stand in place of any value.

    `heading` is the comment at the top. `below` is the key under which the whole tree is written; "" for none. In
    texts, `${` must begin an interpolation.
    """
    lines = [f"# {line}" for line in heading.splitlines()]
    if below:
        lines += [f"{below}:"]
    margin = _INDENT if below else ""
    lines += [f"{margin}{line}".rstrip() for line in _mapping(Config, tree)]
    return "\n".join(lines) + "\n"


def _mapping(model: type[BaseModel], tree: Mapping[str, Any]) -> Iterator[str]:
    for key, value in tree.items():
        field = model.model_fields[key]
        if key in rooms and isinstance(value, Mapping):
            yield ""
            yield f"{key}:"
            for name, entry in value.items():
                yield f"{_INDENT}{_scalar(name)}:"
                kind = rooms[key].load(str(entry["kind"])).Config
                yield from _indented(_mapping(kind, entry), 2)
            continue
        inner = _model_of(field.annotation)
        if key == "kind":
            yield from _comment(_paragraph(inspect.getdoc(model)))
        else:
            yield from _comment(_paragraph(field.description or (inspect.getdoc(inner) if inner else "")))
        if inner is not None and isinstance(value, Mapping):
            # A key without a value would be null.
            unset = all(isinstance(item, Suggestion) for item in value.values())
            yield f"{'#' if unset else ''}{key}:"
            yield from _indented(_mapping(inner, value), 1)
        elif isinstance(value, Suggestion):
            yield from (f"#{line}" for line in _entry(key, value.value))
        else:
            yield from _entry(key, value)


def _indented(lines: Iterable[str], times: int) -> Iterator[str]:
    return (f"{_INDENT * times}{line}".rstrip() for line in lines)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model in the type of a key: `Limits`, `JournalConfig | None`, `Annotated[Priorities, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        found = (_model_of(part) for part in typing.get_args(annotation))
        return next((model for model in found if model is not None), None)
    return None


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").split("\n\n", 1)[0].split())


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)]


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Configurations are read in OmegaConf's dialect, in which `1e3` is a number, and SafeDumper does not know that.
    style = "|" if "\n" in text else None if text[:1].isalpha() or text[:1] == "/" else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _entry(key: str, value: Any) -> list[str]:
    if isinstance(value, (Mapping, list, tuple)):
        return [f"{_scalar(key)}: {_dumped(_plain(value), flow=True)}"]
    return _dumped({key: value}).splitlines()


def _scalar(name: str) -> str:
    return _dumped({name: 0}).removesuffix(": 0")


def _dumped(value: Any, *, flow: bool = False) -> str:
    dumped: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=10**6
    )
    return dumped.rstrip("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, (list, tuple)) else value


__all__ = ["Suggestion", "commented_yaml"]
