"""What the models allow at each place, in words.

It is read from their JSON Schema, so that the messages cannot say anything else than the models do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

from .models import Config

Shape: TypeAlias = Mapping[str, Any]
"""A node of the JSON Schema."""

_NOTHING: Shape = {"type": "null"}

_PATTERNS = {
    "function": "`package.module:name` or `path/to/file.py:name`",
    "api_key_env": "the name of an environment variable",
    "score_key": "the way to the value in a reply, its keys joined by dots (`data.score`)",
}
"""Regular expressions of the models, said for people, by key."""


@cache
def _schema() -> dict[str, Any]:
    return Config.model_json_schema()


def top() -> Shape:
    """The shape of the whole tree."""
    return _schema()


def choices(shape: Shape) -> list[Shape]:
    """The shapes that a value may have here, null left out."""
    if "$ref" in shape:
        return choices(_schema()["$defs"][shape["$ref"].rpartition("/")[2]])
    if "anyOf" in shape or "oneOf" in shape:
        return [choice for part in shape.get("anyOf") or shape["oneOf"] for choice in choices(part)]
    return [] if shape.get("type") == "null" else [shape]


def kinds(shape: Shape) -> dict[str, Shape]:
    """The shapes that the key `kind` chooses between here, by kind; empty where there is no such choice."""
    return {
        choice["properties"]["kind"]["const"]: choice
        for choice in choices(shape)
        if "kind" in choice.get("properties", {})
    }


def at(path: tuple[str | int, ...], tree: Any) -> list[Shape]:
    """The shapes allowed at `path`, in view of the kinds that `tree` names on the way."""
    shapes = [top()]
    for key in path:
        shapes = [choice for shape in shapes for choice in choices(_below(shape, key, tree))]
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return shapes


def _below(shape: Shape, key: str | int, tree: Any) -> Shape:
    kind = shape.get("properties", {}).get("kind", {}).get("const")
    if kind is not None and isinstance(tree, Mapping) and tree.get("kind") != kind:
        return _NOTHING
    if isinstance(key, int):
        below = shape["prefixItems"][key] if "prefixItems" in shape else shape.get("items")
    elif "patternProperties" in shape:
        below = next(iter(shape["patternProperties"].values()))
    else:
        below = shape.get("properties", {}).get(key, shape.get("additionalProperties"))
    return below if isinstance(below, Mapping) else _NOTHING


def wanted(shapes: list[Shape], *, key: str | int) -> str:
    """What a value of one of these shapes is: "a positive number", "true or false"."""
    return " or ".join(dict.fromkeys(_words(shape, key) for shape in shapes)) or "something else"


def _words(shape: Shape, key: str | int) -> str:
    kind = shape.get("type")
    if kind in ("number", "integer"):
        return _number_words(shape, "number" if kind == "number" else "whole number")
    if kind == "boolean":
        return "true or false"
    if kind == "string":
        if "const" in shape:
            return f"`{shape['const']}`"
        if "enum" in shape:
            return "one of " + ", ".join(f"`{value}`" for value in shape["enum"])
        if "pattern" in shape:
            return _PATTERNS[str(key)]
        return "text that is not empty" if shape.get("minLength") else "text"
    if kind == "array":
        if "prefixItems" in shape:
            return "a list of two numbers, the low and the high end"
        return "a list of texts that is not empty" if shape.get("minItems") else "a list of texts"
    if not shape.get("properties"):
        return "a mapping with at least one entry" if shape.get("minProperties") else "a mapping"
    required = [name for name in shape.get("required", ()) if name != "kind"]
    return f"a mapping with `{required[0]}`" if len(shape["properties"]) == 1 else "a mapping"


def _number_words(shape: Shape, noun: str) -> str:
    low, high = shape.get("minimum"), shape.get("maximum")
    if shape.get("exclusiveMinimum") == 0:
        return f"a positive {noun}"
    if low is not None:
        return f"a {noun} from {low:g} to {high:g}" if high is not None else f"a {noun}, {low:g} or more"
    return f"a {noun}"
