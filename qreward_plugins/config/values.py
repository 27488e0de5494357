"""Checks the values of a tree with the models, and says what is wrong with them in plain words.

pydantic finds the mistakes; none of its sentences and none of its errors get out, because they hold the input, and the
input may hold keys.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from . import shape
from .findings import Finding, Path, did_you_mean, scalar_text
from .models import Config
from .tree import Broken


def check_values(tree: dict[str, Any]) -> tuple[Config | None, list[Finding]]:
    """The configuration, or None and what is wrong with `tree`. Paths are those of `tree`.

    There may be nothing to say although there is no configuration: values that could not be had, and unknown kinds, are
    left to those who found them.
    """
    try:
        return Config.model_validate(tree), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    findings: dict[Path, Finding] = {}
    for detail in details:
        kind, path = detail["type"], _path(detail["loc"], tree)
        if detail["loc"][0] == "on_failure" and isinstance(tree["on_failure"], dict):
            if detail["loc"][1:2] != ("Constant",):
                continue
        elif detail["loc"][0] == "on_failure":
            path = ("on_failure",)
        value = _value(path, tree)
        if isinstance(value, Broken) or (kind.startswith("union_tag") and isinstance(value, dict)):
            continue
        if kind == "missing" and isinstance(_value(path[:-1], tree), list):
            kind, path = "too_short", path[:-1]
            value = _value(path, tree)
        said = str(detail["ctx"]["error"]) if kind == "value_error" and not isinstance(value, bool) else ""
        findings.setdefault(path, _finding(kind, path, value, said, tree, is_key=detail["loc"][-1] == "[key]"))
    return None, list(findings.values())


def _finding(kind: str, path: Path, value: Any, said: str, tree: Any, *, is_key: bool) -> Finding:
    if said:
        return Finding(path, said, excerpt=_url_excerpt(value))
    if is_key:
        return Finding(path, "the name must be lower-case letters, digits and underscores, and start with a letter")
    wanted = shape.wanted(shape.at(path, tree), key=path[-1])
    if kind == "missing":
        return Finding(path, "the key is missing", f"It takes {wanted}.")
    if kind == "finite_number":
        wanted = wanted.replace("a ", "a finite ", 1)
    remedy = ""
    if value is None:
        remedy = "Give it a value, or remove the key."
    elif isinstance(value, (bool, int, float)) and "text" in wanted:
        remedy = "Put it in quotes."
    elif isinstance(value, str) and wanted.startswith("one of"):
        remedy = did_you_mean(value, [name for one in shape.at(path, tree) for name in one.get("enum", ())]).strip()
    return Finding(path, f"must be {wanted}", remedy, f", not {scalar_text(value)}")


def _url_excerpt(value: Any) -> str:
    # What a URL may not hold is credentials.
    return f" (not {scalar_text(value)})" if isinstance(value, str) and not set("@?#") & set(value) else ""


def _path(loc: tuple[str | int, ...], tree: Any) -> Path:
    """The path in `tree` that pydantic means by `loc`, where the names of union members stand between the keys."""
    keys = list(loc)
    if keys[0] in ("sources", "judges"):
        del keys[2:3]
    elif keys[0] == "on_failure":
        del keys[1:2]
    elif keys[:2] == ["groups", "min_scored"]:
        del keys[2:]
    path: Path = ()
    for key in keys:
        if key == "[key]" or (isinstance(key, int) and isinstance(tree, str)):
            # A model's validator made a list of it.
            continue
        path = (*path, key)
        tree = _child(tree, key)
    return path


def _value(path: Path, tree: Any) -> Any:
    for key in path:
        tree = _child(tree, key)
    return tree


def _child(tree: Any, key: str | int) -> Any:
    if isinstance(tree, dict):
        return tree.get(key)
    return tree[key] if isinstance(tree, list) and isinstance(key, int) and key < len(tree) else None
