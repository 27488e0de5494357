"""The tables of all keys of the configuration in `docs/keys.md`, from the models themselves.

Types, defaults and meanings come from the JSON Schema of the models that check a configuration, so the page cannot
differ from what is accepted. Only units are written here: most follow from the name of a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from qreward_plugins.config import AskingConfig, Config, EndpointConfig, JudgeConfig, SourceConfig
from qreward_plugins.config.registry import rooms

Shape = Mapping[str, Any]
"""A node of the JSON Schema, with references resolved."""

SUFFIXES = {
    "_s": "seconds",
    "_bytes": "bytes",
    "_mb": "MB",
    "_chars": "characters",
    "_tokens": "tokens",
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "_per_million": "US dollars",
    "per_request": "US dollars",
    "_parallel": "devices",
}
"""Units by the end of a key's name."""

UNITS = {
    "above": "reward",
    "at": "reward",
    "at_least": "reward",
    "below": "reward",
    "burst": "requests",
    "clip": "reward",
    "concurrency": "requests",
    "constant": "reward",
    "correct_at": "reward",
    "data_parallel": "replicas",
    "discount": "factor",
    "floor": "reward",
    "give_up_after": "groups",
    "hedge_budget": "share",
    "invalid_retries": "tries",
    "label": "",
    "max_attempts": "attempts",
    "list_size": "responses",
    "max_count": "images",
    "max_tests": "tests",
    "max_side": "pixels",
    "max_size": "calls",
    "min_mass": "probability",
    "min_scored": "samples",
    "otherwise": "reward",
    "points": "points",
    "priority": "",
    "quorum": "judges",
    "restarts": "restarts",
    "reward_range": "reward",
    "scale": "factor",
    "score_range": "score",
    "seed": "",
    "shift": "reward",
    "temperature": "",
    "train": "",
    "validation": "",
    "weight": "share",
    "workers": "processes",
    "usd": "US dollars",
}
"""Units of the other numbers, by name; "" for a number without one."""

_DEFAULT = re.compile(r"(?:^|(?<=[.)\]`] ))Default: ((?:[^.`]|`[^`]*`|\.(?=\S))*)\.?(?=\s|$)")
_PAGE = re.compile(r"\bdocs/(\w+)\.md\b")


@dataclass(frozen=True)
class Key:
    """One key of the configuration. `path` is unique on the page, e.g. `sources.openai.dialect`."""

    path: str
    type: str
    unit: str
    default: str
    meaning: str

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class Section:
    """A mapping with its keys. `level` is that of its heading."""

    title: str
    anchor: str
    level: int
    text: str
    keys: tuple[Key, ...]


def every_key() -> str:
    """All sections, as Markdown."""
    return "\n".join(map(written, sections())).strip()


def sections() -> Iterator[Section]:
    """All keys: the top level, then what sources and judges have in common, then each kind."""
    yield from _mapping("The top level", "", shape_of(Config), {}, 2, text="The keys of the file.", anchor="top")
    rooms_of = {
        "sources": [("Every source", SourceConfig), ("Sources over HTTP", EndpointConfig)],
        "judges": [("Every judge", JudgeConfig), ("Judges that ask sources", AskingConfig)],
    }
    for room, bases in rooms_of.items():
        known: dict[str, Shape] = {}
        for title, model in bases:
            found = shape_of(model)
            anchor = title.lower().replace(" ", "-")
            yield from _mapping(title, room, found, known, 2, text=_text(found), anchor=anchor)
            known.update(found["properties"])
        for kind, _ in rooms[room].loadable():
            found = shape_of(rooms[room].load(kind).Config)
            text = f"{_text(found)} {_inherited(rooms[room].load(kind).Config)}"
            yield from _mapping(f"{room[:-1].capitalize()}: `{kind}`", f"{room}.{kind}", found, known, 2, text=text)


def written(section: Section) -> str:
    """Return a section as Markdown."""
    lines = [f'<a id="{section.anchor}"></a>', "", f"{'#' * section.level} {section.title}", "", section.text, ""]
    if section.keys:
        lines += ['<div class="keys" markdown>', "", "| key | type and unit | default | meaning |", "|---|---|---|---|"]
        lines += [
            f'| <a id="{key.path.replace("[]", "")}"></a>`{key.name}` '
            f"| {_cell(', '.join(filter(None, (key.type, key.unit))))} | {_cell(key.default)} | {_cell(key.meaning)} |"
            for key in section.keys
        ]
        lines += ["", "</div>"]
    return "\n".join([*lines, ""])


def unit_of(name: str) -> str | None:
    """The unit of a number; "" if it has none, None if it is not known."""
    if name in UNITS:
        return UNITS[name]
    return next((unit for suffix, unit in SUFFIXES.items() if name.endswith(suffix)), None)


def is_number(node: Shape) -> bool:
    """Whether a key takes a number, or a range of numbers."""
    return any(
        one.get("type") in ("number", "integer")
        or [item.get("type") for item in one.get("prefixItems", ())] == ["number"] * 2
        for one in choices(node)
    )


def _mapping(
    title: str, path: str, node: Shape, known: Mapping[str, Shape], level: int, *, text: str, anchor: str = ""
) -> Iterator[Section]:
    """The section of a mapping, without the keys in `known`, and those of the mappings in it."""
    own = {name: below for name, below in node["properties"].items() if known.get(name) != below}
    required = set(node.get("required", ()))
    keys = tuple(_key(_joined(path, name), name, below, name in required) for name, below in own.items())
    yield Section(title, anchor or path.replace("[]", ""), level, text, keys)
    for name, below in own.items():
        if level == 2 and path == "" and name in rooms:
            continue
        for place, inner in _inner(_joined(path, name), below):
            yield from _mapping(f"`{place}`", place, inner, {}, 3, text=_text(inner))


def _inner(path: str, node: Shape) -> Iterator[tuple[str, Shape]]:
    """The mappings with known keys that a value may be, may be a list of, or may map names to."""
    for one in choices(node):
        if one.get("properties"):
            yield path, one
        elif isinstance(below := one.get("additionalProperties"), Mapping):
            yield from _inner(f"{path}.NAME", below)
        elif isinstance(below := one.get("items"), Mapping):
            yield from _inner(f"{path}[]", below)


def _key(path: str, name: str, node: Shape, required: bool) -> Key:
    meaning = _text(node)
    stated = _DEFAULT.search(meaning)
    if required:
        default = "required"
    elif stated:
        default = stated[1]
        meaning = f"{meaning[: stated.start()]}{meaning[stated.end() :]}".strip()
    elif isinstance(node.get("default"), dict) or "default" not in node:
        default = ""
    else:
        default = f"`{_as_yaml(node['default'])}`"
    unit = (unit_of(name) or "") if is_number(node) else ""
    return Key(path, wanted(choices(node)) or "any value", unit, default, meaning)


def _text(node: Shape) -> str:
    words = " ".join(str(node.get("description", "")).split())
    return _PAGE.sub(lambda found: f"[{found[1].replace('_', ' ')}]({found[1]}.md)", words)


def _inherited(model: type) -> str:
    bases = [("asking", AskingConfig), ("every judge", JudgeConfig), ("http", EndpointConfig), ("all", SourceConfig)]
    named = {
        "asking": "It has the keys of [every judge](#every-judge) that "
        "[asks sources](#judges-that-ask-sources), and these:",
        "every judge": "It has the keys of [every judge](#every-judge), and these:",
        "http": "It has the keys of [every source](#every-source) that is "
        "[asked over HTTP](#sources-over-http), and these:",
        "all": "It has the keys of [every source](#every-source), and these:",
    }
    return next(named[name] for name, base in bases if issubclass(model, base))


def shape_of(model: type[BaseModel]) -> Shape:
    """Return the shape of a model."""
    schema = model.model_json_schema()
    found: Shape = _inlined(schema, schema.get("$defs", {}))
    return found


def _inlined(node: Any, named: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, named) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        node = {**named[node["$ref"].rpartition("/")[2]], **{k: v for k, v in node.items() if k != "$ref"}}
    return {key: _inlined(value, named) for key, value in node.items() if key != "$defs"}


def choices(shape: Shape) -> list[Shape]:
    """Return the shapes that a value may have, without null. What a union says that it takes holds for all of them."""
    union = shape.get("anyOf") or shape.get("oneOf")
    if union:
        said = {"takes": shape["takes"]} if "takes" in shape else {}
        return [{**choice, **said} for part in union for choice in choices(part)]
    return [] if shape.get("type") == "null" else [shape]


def wanted(shapes: list[Shape]) -> str:
    """Describe a value of these shapes: "a positive number", "true or false"; "" if there is no description."""
    words = [_words(shape) for shape in shapes]
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
    if kind == "string":
        return "text that is not empty" if shape.get("minLength") else "text"
    if kind == "array":
        of = " of texts" if shape.get("items", {}).get("type") == "string" else ""
        least = shape.get("minItems", 0)
        return f"a list{of}" + ("", " that is not empty", f" with {least} or more")[min(least, 2)]
    return {"boolean": "true or false", "object": "a mapping"}.get(str(kind), "")


def _number_words(shape: Shape, noun: str) -> str:
    low, high, above = shape.get("minimum"), shape.get("maximum"), shape.get("exclusiveMinimum")
    if low is not None and high is not None:
        return f"a {noun} from {low:g} to {high:g}"
    bounds = [f"{low:g} or more"] if low is not None else []
    bounds += [f"{high:g} or less"] if high is not None else []
    return ", ".join([f"a positive {noun}" if above == 0 else f"a {noun}", *bounds])


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _as_yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower() if value is not None else "none"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
