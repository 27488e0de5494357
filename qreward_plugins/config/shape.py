"""Describes the values that the models allow at each place, for messages.

It reads the JSON Schema of the models, so that the messages always agree with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

from pydantic import BaseModel

from .models import Config
from .registry import rooms

Shape: TypeAlias = Mapping[str, Any]
"""A node of the JSON Schema, with references resolved."""


@cache
def of(model: type[BaseModel]) -> Shape:
    """The shape of a model."""
    try:
        schema = model.model_json_schema()
    except Exception:
        # A model of another package may have types without a JSON Schema. Its keys are known nevertheless.
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        required = [name for name, field in fields.items() if field.is_required()]
        return {
            "type": "object",
            "properties": {key: {} for key in fields},
            "required": required,
            "additionalProperties": False,
        }
    inlined: Shape = _inlined(schema, schema.get("$defs", {}), ())
    return inlined


def _inlined(node: Any, named: Mapping[str, Any], above: tuple[str, ...]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, named, above) for item in node]
    if not isinstance(node, dict):
        return node
    name = str(node.get("$ref", "")).rpartition("/")[2]
    if name in above:
        return {}
    if name in named:
        return _inlined({**named[name], **{k: v for k, v in node.items() if k != "$ref"}}, named, (*above, name))
    return {key: _inlined(value, named, above) for key, value in node.items() if key != "$defs"}


def of_kind(room: str, name: str) -> Shape:
    """The shape of an entry of `room` of this kind. Raises `KindError`."""
    return of(rooms[room].load(name).Config)


def of_kinds(room: str) -> dict[str, Shape]:
    """The shapes of all registered kinds that can be used, by name."""
    return {name: of(kind.Config) for name, kind in rooms[room].loadable()}


def top() -> Shape:
    """The shape of the whole tree."""
    return of(Config)


def choices(shape: Shape) -> list[Shape]:
    """Return the shapes that a value may have, without null. What a union says that it takes holds for all of them."""
    if "anyOf" in shape or "oneOf" in shape:
        said = {"takes": shape["takes"]} if "takes" in shape else {}
        return [{**choice, **said} for part in shape.get("anyOf") or shape["oneOf"] for choice in choices(part)]
    return [] if shape.get("type") == "null" else [shape]


def names(shape: Shape) -> str:
    """Return the type of name that a value of this shape, or an item of its list, is: `JudgeName`, `SourceName`, ""."""
    return str(shape.get("names") or shape.get("items", {}).get("names", ""))


def holds(shape: Any, key: str, value: str) -> bool:
    """Whether `key` has this value anywhere in a shape."""
    if isinstance(shape, Mapping):
        return shape.get(key) == value or any(holds(below, key, value) for below in shape.values())
    return isinstance(shape, list) and any(holds(below, key, value) for below in shape)


def of_mappings(shapes: list[Shape]) -> list[Shape]:
    """The shapes of mappings among these. A list may be written as its only item."""
    items = [_item(shape, 0) for shape in shapes if shape.get("type") == "array"]
    of_items = [choice for item in items if isinstance(item, Mapping) for choice in choices(item)]
    return [shape for shape in (*shapes, *of_items) if shape.get("type") == "object"]


def below(shapes: list[Shape], key: str | int) -> list[Shape]:
    """The shapes that a value may have below one of these shapes."""
    found = (_item(shape, key) if isinstance(key, int) else _property(shape, key) for shape in shapes)
    return [choice for shape in found if isinstance(shape, Mapping) for choice in choices(shape)]


def _item(shape: Shape, number: int) -> Any:
    items = shape.get("prefixItems", ())
    return items[number] if number < len(items) else shape.get("items")


def _property(shape: Shape, key: str) -> Any:
    if "patternProperties" in shape:
        return next(iter(shape["patternProperties"].values()))
    return shape.get("properties", {}).get(key, shape.get("additionalProperties"))


def is_secret(shapes: list[Shape]) -> bool:
    """Whether one of the shapes is that of a secret (`SecretStr`), or holds one."""
    return any(holds(shape, "format", "password") for shape in shapes)


def wanted(shapes: list[Shape]) -> str:
    """Describe a value of these shapes: "a positive number", "true or false"; "" if there is no description."""
    words = [_words(shape) for shape in shapes]
    if "a mapping" in words:
        words = [word for word in words if not word.startswith("a mapping with")]
    return " or ".join(dict.fromkeys(words)) if all(words) else ""


def _words(shape: Shape) -> str:
    kind = shape.get("type")
    if "takes" in shape:
        return str(shape["takes"])
    if "const" in shape or "enum" in shape:
        allowed = shape.get("enum") or [shape["const"]]
        return ("one of " if len(allowed) > 1 else "") + ", ".join(f"`{_as_yaml(value)}`" for value in allowed)
    if kind in ("number", "integer"):
        return _number_words(shape, "number" if kind == "number" else "whole number")
    if kind == "boolean":
        return "true or false"
    if kind == "string":
        if shape.get("format", "password") != "password":
            return ""
        if "pattern" in shape:
            return f"text that matches `{shape['pattern']}`"
        return "text that is not empty" if shape.get("minLength") else "text"
    if kind == "array":
        items = [item.get("type") for item in shape.get("prefixItems", ())]
        if items == ["number", "number"]:
            return "a list of two numbers, the low and the high end"
        of = " of texts" if shape.get("items", {}).get("type") == "string" else ""
        least = shape.get("minItems", 0)
        return f"a list{of}" + ("", " that is not empty", f" with {least} or more")[min(least, 2)]
    if kind != "object":
        return ""
    if not shape.get("properties"):
        return "a mapping with at least one entry" if shape.get("minProperties") else "a mapping"
    required = [name for name in shape.get("required", ()) if name != "kind"]
    return f"a mapping with `{required[0]}`" if len(shape["properties"]) == 1 and required else "a mapping"


def _as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number_words(shape: Shape, noun: str) -> str:
    low, high = shape.get("minimum"), shape.get("maximum")
    above, below = shape.get("exclusiveMinimum"), shape.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f"a {noun} from {low:g} to {high:g}"
    bounds = [f"{low:g} or more"] if low is not None else []
    bounds += [f"{high:g} or less"] if high is not None else []
    bounds += [f"above {above:g}"] if above else []
    bounds += [f"below {below:g}"] if below is not None else []
    return ", ".join([f"a positive {noun}" if above == 0 else f"a {noun}", *bounds])
