"""Resolves the interpolations of a configuration: `${oc.env:NAME}`, `${key.of.the.tree}`.

OmegaConf stops at the first value that it cannot resolve. Here every value is resolved on its own, so that an unset
environment variable does not hide other mistakes. The caller's object, its flags and its parents do not change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationKeyError

from ..secrets import with_secrets
from .findings import Finding, Path

_MOST_LEVELS = 64
"""Deepest nesting. OmegaConf reports Python's own `RecursionError` as one of many interpolations that fail."""
_SCALARS = (str, int, float, bool, type(None))
_ENV = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}")
_ENV_NAMED = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)")
_FROM_A_SECRET = re.compile(r"oc\.env|api_key|headers")
_INTERPOLATIONS = (
    "`${oc.env:NAME}` is an environment variable, `${above.key}` a key of the tree, `${.key}` a neighbour. "
    "Write `\\${` for a literal `${`."
)
_HANDED_ON = {"kwargs", "parameters", "arguments", "command", "program"}
"""Keys whose values may be anything, credentials included."""


class Unresolved:
    """Stands in the tree for a value that cannot be resolved. A finding says why."""


class _Wrapped:
    """Wraps an object for OmegaConf, which would otherwise convert or reject it."""

    def __init__(self, value: object) -> None:
        self.value = value


def resolve(source: Any) -> tuple[Any, list[Finding]]:
    """Copy `source` (a mapping, or a DictConfig, which may be a node of a trainer's tree) into dicts, lists and values,
    with interpolations resolved. Raises `RecursionError` if it contains itself.
    """
    findings: list[Finding] = []
    if not isinstance(source, DictConfig):
        source = OmegaConf.create(_plain(source, (), findings), flags={"allow_objects": True})
    if not isinstance(OmegaConf.to_container(source, resolve=False), dict):
        return None, findings  # a node that is null, missing or an interpolation
    return _resolved(source, (), findings), findings


def _plain(value: Any, path: Path, findings: list[Finding]) -> Any:
    """Copy values into types that OmegaConf accepts."""
    if isinstance(value, (DictConfig, ListConfig)):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        items = [(_key(key, path, findings), item) for key, item in value.items()]
        return {key: _plain(item, (*path, key), findings) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_plain(item, (*path, n), findings) for n, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str) and "${" in value:
        try:
            OmegaConf.create([value])
        except GrammarParseError:
            findings.append(Finding(path, "`${` starts an interpolation that cannot be read", _INTERPOLATIONS))
            value = Unresolved()
    return value if isinstance(value, _SCALARS) else _Wrapped(value)


def _key(key: Any, path: Path, findings: list[Finding]) -> str:
    """Return a key as text. YAML reads the training steps of a schedule as numbers."""
    if isinstance(key, str):
        return key
    if type(key) is int:
        return str(key)
    text = "null" if key is None else str(key)
    what = {"True": "true (as YAML reads yes and on)", "False": "false (as YAML reads no and off)"}.get(text, text)
    findings.append(Finding((*path, text), f"the key is not text but {what}", "Keys are text; put it in quotes."))
    return text


def _resolved(node: Any, path: Path, findings: list[Finding]) -> Any:
    """Copy the values of a node of OmegaConf, each resolved on its own."""
    if len(path) > _MOST_LEVELS:
        raise RecursionError
    if isinstance(node, ListConfig):
        return [_child(node, n, (*path, n), findings) for n in range(len(node))]
    if isinstance(node, DictConfig):
        keys = [(key, _key(key, path, findings)) for key in node]
        return {text: _child(node, key, (*path, text), findings) for key, text in keys}
    if isinstance(node, _Wrapped):
        return node.value
    return os.fspath(node) if isinstance(node, os.PathLike) else node


def _child(node: Any, key: Any, path: Path, findings: list[Finding]) -> Any:
    if OmegaConf.is_missing(node, key):
        findings.append(Finding(path, "has no value yet (`???`)", "Set it."))
        return Unresolved()
    if not OmegaConf.is_interpolation(node, key):
        return _resolved(node[key], path, findings)
    expression = str(OmegaConf.to_container(node, resolve=False)[key])  # type: ignore[index]
    try:
        value = node[key]
    except RecursionError:
        raise
    except Exception as error:
        # Resolvers are anybody's functions; their messages may hold anything and are not passed on.
        findings += [Finding(path, *problem) for problem in _why(expression, error)]
        return Unresolved()
    resolved = _resolved(value, path, findings)
    if _HANDED_ON & set(path) and _FROM_A_SECRET.search(expression):
        within = tuple(os.environ[name] for name in _ENV_NAMED.findall(expression) if os.environ.get(name))
        resolved = with_secrets(resolved, secret=True, within=within)
    return resolved


def _why(expression: str, error: Exception) -> Iterator[tuple[str, str]]:
    """Yield problem and remedy of an interpolation that cannot be resolved."""
    unset = [name for name in _ENV.findall(expression) if name not in os.environ]
    for name in dict.fromkeys(unset):
        yield f"the environment variable {name} is not set", f"Set it: export {name}=..."
    if unset:
        return
    problem = (
        "refers to a key that does not exist" if isinstance(error, InterpolationKeyError) else "cannot be resolved"
    )
    yield problem, _INTERPOLATIONS
