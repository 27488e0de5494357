"""Defines `load_config`: it reads a file, a mapping or a trainer's DictConfig, and returns a checked `Config` or raises
all mistakes at once.

The checks run one after the other over the same tree. Each skips the places that an earlier one has reported. Errors
are raised outside of `except` blocks, so that they have no `__context__`: exceptions of pydantic and OmegaConf hold the
input with its keys, and some loggers print `__context__` even if Python does not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from omegaconf import DictConfig, ListConfig

from ..errors import ConfigurationError, Mistake
from .findings import Finding, Path, cut
from .keys import KeyCheck
from .models import Config
from .origin import Origin, with_origin
from .references import check_references
from .served import check_served, names_server
from .several_keys import configured_name, with_each_key
from .tree import Tree, read_tree
from .values import check_values
from .yaml_file import read_yaml


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | DictConfig | Config, *, origin: str | None = None
) -> Config:
    """Read and check a configuration.

    `source` is the path of a YAML file (a leading `~` is the home directory), the same tree as a mapping, or a
    DictConfig, which may be a node of a trainer's tree. It is never changed. A single top-level key `qreward` is
    unwrapped. Interpolations are OmegaConf's: `${oc.env:NAME}`, `${oc.env:NAME,default}`, `${key.of.the.tree}`. A
    `Config` is checked for names of sources and judges that do not exist. A source with several keys becomes one
    source for each key (`several_keys`).

    `origin` is the name of the source in messages; default: the path.

    Raises `ConfigurationError` with every mistake and its path. It never shows values of `api_key`, `headers`,
    `parameters`, `body`, `kwargs` or unknown keys, and has no cause and no context.
    """
    if isinstance(source, Config):
        return _checked_references(source, origin or "configuration")
    if isinstance(source, (str, os.PathLike)):
        path, origin = _path(source, origin)
        tree = read_yaml(path, origin=origin)
        return with_origin(_read(tree, origin), Origin(path, partial(_read, origin=origin), tree))
    return _read(source, origin or "configuration")


def _read(source: Any, origin: str) -> Config:
    if source is None or source == "":
        raise ConfigurationError([Mistake("", "the configuration is empty.", _START)], origin=origin)
    if not isinstance(source, (Mapping, DictConfig)):
        kind = "a list" if isinstance(source, (list, tuple, ListConfig)) else f"of type {type(source).__name__}"
        problem = f"the configuration must be a mapping, but it is {kind}."
        raise ConfigurationError([Mistake("", problem, _START)], origin=origin)
    try:
        tree = read_tree(source)
    except RecursionError:
        tree = None
    if tree is None:
        raise ConfigurationError([Mistake("", "the configuration is nested too deeply.")], origin=origin)
    return _checked(tree, origin)


_START = "It starts with the keys `sources` and `judges`."


def _path(source: str | os.PathLike[str], origin: str | None) -> tuple[str, str]:
    path = os.fsdecode(source)
    if not path.strip():
        raise ConfigurationError([Mistake("", "the path of the file is empty.")], origin=origin or "configuration")
    if "\n" in path or ("{" in path and ":" in path and not os.path.exists(path)):
        problem = "a text must be the path of a YAML file, but this text looks like YAML."
        remedy = "Write it to a file, or pass the tree as a dict."
        raise ConfigurationError([Mistake("", problem, remedy)], origin=origin or "configuration")
    return os.path.expanduser(path), origin or path


def _checked(tree: Tree, origin: str) -> Config:
    order = _order(tree.value)
    findings = list(tree.findings)
    config: Config | None = None
    keys: KeyCheck | None = None
    if isinstance(tree.value, dict) and tree.value:
        keys = KeyCheck(tree.value)
        if keys.foreign:
            raise ConfigurationError([finding.as_mistake(hidden=True) for finding in keys.findings], origin=origin)
        if names_server(tree.value):
            findings += check_served(tree.value)
        config, wrong_values = check_values(tree.value, keys.shapes)
        findings += keys.findings
        unsure = [finding.path for finding in keys.findings + wrong_values]
        if any(finding.path[:2] == ("engine", "server") for finding in wrong_values):
            # A reward server has them.
            wrong_values = [one for one in wrong_values if one.path[0] in tree.value or len(one.path) > 1]
        for finding in wrong_values + check_references(tree.value, keys.names, unsure=unsure):
            findings.append(_located(finding, keys.written(finding.path), tree))
    elif not findings:
        what = "is empty" if not tree.value else "must be a mapping"
        findings.append(Finding((), f"the configuration {what}", _START))
    if config is None or findings:
        findings.sort(key=lambda finding: _position(finding.path, order))
        raise ConfigurationError(
            [finding.as_mistake(hidden=keys is not None and keys.hides(finding.path)) for finding in findings],
            origin=origin,
        )
    return with_each_key(config)


def _checked_references(config: Config, origin: str) -> Config:
    tree = {
        "sources": {
            configured_name(name): {**dict(source), "kind": source.kind, "model": getattr(source, "model", None)}
            for name, source in config.sources.items()
        },
        "judges": {name: judge.model_dump(mode="json") for name, judge in config.judges.items()},
        "routes": {
            pattern: route if isinstance(route, str) else route.judge for pattern, route in config.routes.items()
        },
        "models": {pattern: group.model_dump(mode="json") for pattern, group in config.models.items()},
    }
    if findings := check_references(tree, KeyCheck(tree).names):
        raise ConfigurationError([finding.as_mistake(hidden=False) for finding in findings], origin=origin)
    return with_each_key(config)


def _located(finding: Finding, written: Path, tree: Tree) -> Finding:
    """Return the finding with the path in the file. A value from an interpolation is shown as the interpolation."""
    excerpt, expression = finding.excerpt, tree.expression_at(written)
    if excerpt and expression is not None:
        excerpt = f", not the value of {cut(expression)}"
    return replace(finding, path=written, excerpt=excerpt)


def _order(value: Any, path: Path = ()) -> dict[Path, int]:
    """Return the position of every key in its mapping, by path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    order: dict[Path, int] = {}
    for n, (key, below) in enumerate(items):
        here = (*path, key if isinstance(key, (str, int)) else str(key))
        order[here] = n
        order.update(_order(below, here))
    return order


def _position(path: Path, order: dict[Path, int]) -> tuple[int, ...]:
    # A missing key sorts after the existing ones.
    return tuple(order.get(path[: n + 1], 1_000_000) for n in range(len(path)))
