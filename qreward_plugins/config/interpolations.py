"""Computes the size of a tree with all interpolations resolved, before OmegaConf resolves them.

A chain such as `a: ${b}${b}`, `b: ${c}${c}` doubles the size with every line. OmegaConf resolves each reference anew,
so thirty such lines would take hours. The count here visits every node once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

MOST_VALUES = 100_000
"""Most values in a configuration, with aliases and interpolations resolved."""
MOST_CHARS = 10_000_000
"""Most characters of all its texts, resolved."""
MOST_STEPS = 32
"""Longest chain of interpolations, each of which refers to the next."""

_REFERENCE = re.compile(r"\.*[A-Za-z0-9_][A-Za-z0-9_.\[\]/-]*")

_Key = tuple[str, ...]


def too_large(tree: Any) -> str:
    """Return a sentence about the bound that the interpolations of `tree` exceed; "" if they exceed none.

    Interpolations are resolved from the root of `tree`.
    """
    root = tree._get_root() if isinstance(tree, DictConfig) else tree
    plain = OmegaConf.to_container(root, resolve=False)
    counter = _Counter(plain)
    try:
        values, chars, steps = counter.size(() if root is tree else _key_of(tree))
    except RecursionError:
        return f"it is nested too deeply, or a chain of its interpolations has more than {MOST_STEPS} steps"
    if steps > MOST_STEPS:
        return f"a chain of its interpolations has more than {MOST_STEPS} steps"
    if values > MOST_VALUES:
        return f"its interpolations resolve to more than {MOST_VALUES:,} values"
    return f"its interpolations resolve to more than {MOST_CHARS:,} characters" if chars > MOST_CHARS else ""


def _key_of(tree: DictConfig) -> _Key:
    full = str(tree._get_full_key(None))
    return _parts(full)


def _parts(path: str) -> _Key:
    return tuple(part for part in re.split(r"[.\[\]]+", path) if part)


_Size = tuple[int, int, int]


class _Counter:
    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._known: dict[_Key, _Size] = {}
        self._open: set[_Key] = set()

    def size(self, key: _Key) -> _Size:
        """Return the number of values and characters and the longest chain of the resolved node at `key`.

        A cycle counts 0, because OmegaConf reports it later.
        """
        if key in self._known:
            return self._known[key]
        if key in self._open:
            return 0, 0, 0
        self._open.add(key)
        self._known[key] = self._count(self._at(key), key)
        self._open.remove(key)
        return self._known[key]

    def _count(self, node: Any, key: _Key) -> _Size:
        chars, step, below = 0, 0, []
        if isinstance(node, Mapping):
            below = [self.size((*key, str(name))) for name in node]
        elif isinstance(node, list):
            below = [self.size((*key, str(number))) for number in range(len(node))]
        elif isinstance(node, str):
            chars, step = len(node), 1
            below = [self.size(reference) for reference in self._references(node, key)]
        values = 1 + sum(size[0] for size in below)
        return values, chars + sum(size[1] for size in below), max((step + size[2] for size in below), default=0)

    def _references(self, text: str, key: _Key) -> list[_Key]:
        """Return the nodes that the interpolations of a text may refer to: all paths in it that exist in the tree."""
        if "${" not in text:
            return []
        found = []
        for path in _REFERENCE.findall(text.partition("${")[2]):
            dots = len(path) - len(path.lstrip("."))
            target = (*key[: max(0, len(key) - dots)], *_parts(path)) if dots else _parts(path)
            if target and self._at(target) is not None:
                found.append(target)
        return found

    def _at(self, key: _Key) -> Any:
        node = self._plain
        for part in key:
            if isinstance(node, Mapping):
                node = node.get(part)
            elif isinstance(node, list) and part.isdecimal() and len(part) < 10 and int(part) < len(node):
                node = node[int(part)]
            else:
                return None
        return node
