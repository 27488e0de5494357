"""Converts the input (plain values, a DictConfig, a node of a trainer's tree) to plain, resolved values.

OmegaConf stops at the first interpolation that it cannot resolve. This module resolves every value on its own, so that
an unset environment variable does not hide other mistakes. It only reads, so the caller's object, its flags and its
parents do not change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationToMissingValueError,
    UnsupportedInterpolationType,
)
from pydantic import BaseModel

from ..secrets import with_secrets
from .environment import environment
from .findings import Finding, Path, cut
from .interpolations import MOST_VALUES, too_large

_MAX_DEPTH = 64
_SCALARS = (str, int, float, bool, type(None))
_ENV = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}")
_ENV_NAMED = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)")
_FROM_A_SECRET = re.compile(r"oc\.env|api_key|headers")
_HANDED_ON = {"kwargs", "parameters", "arguments", "command", "program"}
"""Keys whose values may be anything, credentials included."""
_ENV_NOT_FOUND = re.compile(r"Environment variable '([A-Za-z_][A-Za-z0-9_]*)' not found")


_ENDLESS = "contains itself, or is nested too deeply"


class _TooManyValues(Exception):
    """The tree holds more than `MOST_VALUES` values."""


class Broken:
    """A placeholder in the tree for a value that cannot be resolved. A finding gives the reason."""


class _Wrapped:
    """Wraps an object for OmegaConf, which would otherwise convert or reject it."""

    def __init__(self, value: object) -> None:
        self.value = value


class Tree:
    """Plain values, with the mistakes found while resolving them."""

    def __init__(self) -> None:
        self.value: Any = None
        self.findings: list[Finding] = []
        self.expressions: dict[Path, str] = {}
        """The interpolations of values, by path. Messages show the interpolation instead of the value."""
        self._left = MOST_VALUES

    def expression_at(self, path: Path) -> str | None:
        """Return the interpolation that gave the value at `path`, or a node above it; None if there is none."""
        return next((self.expressions[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.expressions), None)

    def read(self, source: Any) -> None:
        """Resolve `source`; see `read_tree`."""
        if not isinstance(source, DictConfig):
            try:
                plain = self._plain(source, (), ())
            except _TooManyValues:
                self.value = self._broken((), f"it holds more than {MOST_VALUES:,} values")
                return
            if not isinstance(plain, dict):
                self.value = plain
                return
            source = OmegaConf.create(plain, flags={"allow_objects": True})
        if grows := too_large(source):
            self.value = self._broken((), grows, "Use fewer interpolations, and do not nest them.")
        elif not isinstance(OmegaConf.to_container(source, resolve=False), dict):
            # A node that is null, missing or an interpolation.
            return
        elif list(source) == ["qreward"]:
            self.findings = [replace(finding, path=finding.path[1:]) for finding in self.findings]
            self.expressions = {path[1:]: expression for path, expression in self.expressions.items()}
            self.value = self._child(source, "qreward", (), (source,))
        else:
            self.value = self._resolved(source, (), ())

    def _plain(self, value: Any, path: Path, above: tuple[int, ...]) -> Any:
        """Copy plain values into types that OmegaConf accepts. What occurs at several places is copied at each."""
        self._left -= 1
        if self._left < 0:
            raise _TooManyValues
        if isinstance(value, (DictConfig, ListConfig)):
            # It is resolved with its own parent, and escaped so that it is not resolved a second time.
            return _escaped(self._resolved(value, path, ()))
        if id(value) in above or len(above) > _MAX_DEPTH:
            return _Wrapped(self._broken(path, _ENDLESS))
        above = (*above, id(value))
        if isinstance(value, BaseModel):
            value = {name: getattr(value, name) for name in value.model_fields_set}
        if isinstance(value, Mapping):
            plain = {}
            for key, item in value.items():
                if isinstance(key, (str, int, float)):
                    plain[key] = self._plain(item, (*path, str(key)), above)
                else:
                    kind = "null" if key is None else f"of type {type(key).__name__}"
                    self._broken(path, f"a key here is {kind}", "Keys are text.")
            return plain
        if isinstance(value, (list, tuple)):
            return [self._plain(item, (*path, n), above) for n, item in enumerate(value)]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, str) and "${" in value:
            try:
                OmegaConf.create([value])
            except GrammarParseError:
                problem = "`${` starts an interpolation that cannot be read"
                remedy = "Write `${oc.env:NAME}` or `${key.of.this.file}`, or `\\${` for a literal `${`."
                return _Wrapped(self._broken(path, problem, remedy, f": {cut(value)!r}"))
        return value if isinstance(value, _SCALARS) else _Wrapped(value)

    def _resolved(self, node: Any, path: Path, above: tuple[Any, ...]) -> Any:
        """Copy the values of a node of OmegaConf, each resolved on its own."""
        if isinstance(node, (DictConfig, ListConfig)):
            if any(node is other for other in above) or len(path) > _MAX_DEPTH:
                return self._broken(path, _ENDLESS)
            above = (*above, node)
            if isinstance(node, ListConfig):
                return [self._child(node, n, (*path, n), above) for n in range(len(node))]
            return {key: self._child(node, key, (*path, str(key)), above) for key in node}
        if isinstance(node, _Wrapped):
            return node.value
        return os.fspath(node) if isinstance(node, os.PathLike) else node

    def _child(self, node: Any, key: Any, path: Path, above: tuple[Any, ...]) -> Any:
        if OmegaConf.is_missing(node, key):
            return self._broken(path, "has no value yet (`???`)", "Set it.")
        if not OmegaConf.is_interpolation(node, key):
            return self._resolved(node[key], path, above)
        expression = str(OmegaConf.to_container(node, resolve=False)[key])  # type: ignore[index]
        self.expressions[path] = expression
        try:
            value = node[key]
        except Exception as error:
            # Resolvers are anybody's functions; their messages may hold anything and are not passed on.
            return self._unresolvable(path, expression, error)
        resolved = self._resolved(value, path, above)
        if _HANDED_ON & set(path) and _FROM_A_SECRET.search(expression):
            known = environment()
            within = tuple(known[name] for name in _ENV_NAMED.findall(expression) if known.get(name))
            resolved = with_secrets(resolved, secret=True, within=within)
        return resolved

    def _broken(self, path: Path, problem: str, remedy: str = "", excerpt: str = "") -> Broken:
        self.findings.append(Finding(path, problem, remedy, excerpt))
        return Broken()

    def _unresolvable(self, path: Path, expression: str, error: Exception) -> Broken:
        names = [name for name in _ENV.findall(expression) if name not in environment()]
        for name in dict.fromkeys(names or _ENV_NOT_FOUND.findall(str(error))):
            self._broken(path, f"the environment variable {cut(name)} is not set", f"Set it: export {cut(name)}=...")
            names.append(name)
        if names:
            return Broken()
        excerpt = f": {cut(expression)!r}"
        if isinstance(error, InterpolationToMissingValueError):
            return self._broken(path, "refers to a key that has no value yet (`???`)", "Set it.", excerpt)
        if isinstance(error, InterpolationKeyError):
            remedy = "Interpolations start at the top of the tree; `${.key}` is a neighbour."
            return self._broken(path, "refers to a key that does not exist", remedy, excerpt)
        if isinstance(error, UnsupportedInterpolationType):
            return self._broken(path, "uses an unknown resolver", "Use `oc.env`, or register the resolver.", excerpt)
        if "Recursive interpolation" in str(error) or "to parent node" in str(error):
            return self._broken(path, "refers to itself, or to a node that contains it", "", excerpt)
        return self._broken(path, "cannot be resolved", "Check the interpolation.", excerpt)


def read_tree(source: Any) -> Tree:
    """Resolve `source`: a Mapping, a DictConfig, or plain values out of a YAML file.

    A single top-level key `qreward` is unwrapped, after which paths start below it.
    """
    tree = Tree()
    tree.read(source)
    return tree


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, str):
        return value.replace("${", "\\${")
    return value if isinstance(value, _SCALARS) else _Wrapped(value)
