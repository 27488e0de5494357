"""Checks the values of a tree with the models, and describes each mistake in plain words.

pydantic finds the mistakes. Its errors are not passed on, because they hold the input, which may contain secrets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ErrorType

from . import shape
from .findings import Finding, Path, did_you_mean, scalar_text
from .models import NO_KIND, ClientConfig, Config, ServedConfig
from .served import is_for_clients, names_server
from .shape import Shape
from .tree import Broken

_RAISED = {"value_error", "assertion_error"}
_KNOWN = frozenset(get_args(ErrorType)) - _RAISED
"""The types of pydantic's own errors. Any other error has a message of one of our validators."""


def check_values(tree: dict[str, Any], shapes: Mapping[Path, list[Shape]]) -> tuple[Config | None, list[Finding]]:
    """Return the configuration, or None and the findings. Paths are those of `tree`; `shapes` are the allowed shapes.

    With None, the findings may be empty: unresolved values and unknown kinds were reported by earlier checks.
    """
    try:
        kind_of_tree = ServedConfig if names_server(tree) else ClientConfig if is_for_clients(tree) else Config
        return kind_of_tree.model_validate(tree), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    findings: dict[Path, Finding] = {}
    for detail in _of_best_members(details, tree):
        kind, path = detail["type"], _path(detail, tree)
        value = _value(path, tree)
        if isinstance(value, Broken) or kind == NO_KIND:
            continue
        if kind == "too_short" and isinstance(value, list) and len(value) >= detail["ctx"]["min_length"]:
            # pydantic counts only the items that are right. The wrong ones have errors of their own.
            continue
        if kind == "missing" and isinstance(_value(path[:-1], tree), list):
            kind, path = "too_short", path[:-1]
            value = _value(path, tree)
        problem = _said(detail)
        if kind.startswith("union_tag") and isinstance(value, dict):
            # The key that selects one of several models is missing or wrong. pydantic's own message quotes its value.
            place = (*path, str(detail["ctx"]["discriminator"]).strip("'"))
            if place in shapes:
                kind, path, value = "missing" if kind == "union_tag_not_found" else "enum", place, _value(place, tree)
            else:
                kind, problem = "no_model", "has none of the forms that it may have"
        is_key = detail["loc"][-1] == "[key]"
        findings.setdefault(path, _finding(kind, path, value, problem, shapes.get(path, []), is_key=is_key))
    return None, list(findings.values())


def _of_best_members(details: Sequence[ErrorDetails], tree: Any) -> list[ErrorDetails]:
    """Keep, of each union, only the errors of the member that fits the value best."""
    plain: list[ErrorDetails] = []
    unions: dict[Path, dict[str | int, list[ErrorDetails]]] = {}
    for detail in details:
        above: Path = ()
        for key, path in _steps(detail, tree):
            if path == above and isinstance(key, str):
                unions.setdefault(path, {}).setdefault(key, []).append(detail)
                break
            above = path
        else:
            plain.append(detail)
    return plain + [detail for members in unions.values() for detail in min(members.items(), key=_distance)[1]]


def _distance(member: tuple[str | int, Sequence[ErrorDetails]]) -> tuple[bool, int, int]:
    """Return a sort key for how badly a union member fits: wrong type first, then wrong keys, then wrong values."""
    name, errors = member
    keys = sum(error["type"] in ("missing", "extra_forbidden") for error in errors)
    return any(error["loc"][-1] == name for error in errors), keys, len(errors)


def _finding(kind: str, path: Path, value: Any, problem: str, shapes: list[Shape], *, is_key: bool) -> Finding:
    """Return the finding for one mistake at `path`. `problem` is the message of a validator or of pydantic."""
    secret, wanted = shape.is_secret(shapes), shape.wanted(shapes)
    if kind not in _KNOWN and not (isinstance(value, bool) and wanted):
        if secret and isinstance(value, str) and value in problem:
            problem = f"must be {wanted}" if wanted else "is not valid"
        return Finding(path, problem, excerpt="" if secret else _url_excerpt(value))
    if is_key:
        return Finding(path, "the name must be lower-case letters, digits and underscores, and start with a letter")
    if kind == "missing":
        return Finding(path, "the key is missing", f"It takes {wanted}." if wanted else "Add it.")
    if kind == "extra_forbidden":
        return Finding(path, "unknown key", "Remove it.")
    if not wanted:
        # For a type of another package, pydantic's own message is used. It does not quote the value.
        return Finding(path, problem, excerpt="" if secret else f", not {scalar_text(value)}")
    if kind == "finite_number":
        wanted = wanted.replace("a ", "a finite ", 1)
    remedy = ""
    if value is None:
        remedy = "Set a value, or remove the key."
    elif isinstance(value, (bool, int, float)) and "text" in wanted and "number" not in wanted:
        remedy = "Put it in quotes."
    elif isinstance(value, str) and wanted.startswith("one of"):
        remedy = did_you_mean(
            value, [name for one in shapes for name in one.get("enum", ()) if isinstance(name, str)]
        ).strip()
    return Finding(path, f"must be {wanted}", remedy, "" if secret else f", not {scalar_text(value)}")


def _said(detail: ErrorDetails) -> str:
    if detail["type"] in _RAISED:
        return str(detail["ctx"]["error"]).rstrip(".")
    return detail["msg"].replace("Input should", "must", 1).rstrip(".")


def _url_excerpt(value: Any) -> str:
    # A URL with one of these characters may contain credentials.
    return f" (not {scalar_text(value)})" if isinstance(value, str) and not set("@?#") & set(value) else ""


def _path(detail: ErrorDetails, tree: Any) -> Path:
    """Return the path in `tree` of an error of pydantic."""
    return list(_steps(detail, tree))[-1][1]


def _steps(detail: ErrorDetails, tree: Any) -> Iterator[tuple[str | int, Path]]:
    """Yield the parts of pydantic's path, each with the path in `tree` up to it. pydantic's path also has the names of
    union members and functions, which add nothing to the path in `tree`.
    """
    path: Path = ()
    for number, key in enumerate(detail["loc"]):
        below = _child(tree, key)
        if below is not _NOTHING or (detail["type"] == "missing" and number == len(detail["loc"]) - 1):
            path, tree = (*path, key), below
        yield key, path


def _value(path: Path, tree: Any) -> Any:
    for key in path:
        tree = _child(tree, key)
    return None if tree is _NOTHING else tree


def _child(tree: Any, key: str | int) -> Any:
    if isinstance(tree, dict):
        return tree.get(key, _NOTHING)
    return tree[key] if isinstance(tree, list) and isinstance(key, int) and 0 <= key < len(tree) else _NOTHING


_NOTHING = object()
