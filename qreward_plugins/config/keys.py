"""Checks the keys of a tree: unknown keys, keys that are not text, and the `kind` that decides which keys are allowed.

A misspelt key is reported as one mistake. The check then corrects its spelling in the tree, so that the values below it
are still checked and the right key is not reported as missing. Later findings give the path as it is in the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import shape
from .findings import Finding, Path, did_you_mean, is_plain_key, nearest, scalar_text
from .registry import KindError, rooms
from .shape import Shape
from .tree import Broken

_REPLACED = {
    "overload_threshold": (
        "overload_requests",
        "It takes a number of requests above the mean instead of a factor. Default: 6.",
    ),
}
"""Keys of earlier versions: the key that replaces each, and what to write. Their values mean something else."""


@dataclass(frozen=True)
class Named:
    """A value at `path` that names a judge or a source; `what` is `JudgeName` or `SourceName`."""

    path: Path
    name: str
    what: str


class KeyCheck:
    """Checks the keys of `tree`, and corrects misspelt ones in place. `findings` holds the mistakes.

    `tree` consists of dicts and lists that belong to the caller of this class alone.
    """

    def __init__(self, tree: dict[str, Any]) -> None:
        self.findings: list[Finding] = []
        self.shapes: dict[Path, list[Shape]] = {}
        """The allowed shapes at each path of the corrected tree, missing keys included."""
        self.names: list[Named] = []
        """Every name of a judge or a source in the tree."""
        self._written: dict[Path, str] = {}
        self._unknown: set[Path] = set()
        known = shape.top()["properties"]
        self.foreign = not any(isinstance(key, str) and (key in known or nearest(key, known)) for key in tree)
        """Whether no top-level key belongs to a configuration. The file is then probably another one, and messages
        show nothing of it."""
        if self.foreign:
            count = "only top-level key is unknown" if len(tree) == 1 else f"{len(tree):,} top-level keys are unknown"
            self.findings.append(Finding((), f"the {count}", f"Allowed here: {', '.join(known)}."))
            return
        self._check(tree, [shape.top()], ())

    def written(self, path: Path) -> Path:
        """Return the path with the keys as they are spelt in the file."""
        return tuple(self._written.get(path[: n + 1], key) for n, key in enumerate(path))

    def hides(self, written: Path) -> bool:
        """Whether the value at this path of the file is below an unknown key; it may be a misplaced secret."""
        return any(written[:n] in self._unknown for n in range(1, len(written) + 1))

    def _check(self, node: Any, allowed: list[Shape], path: Path) -> None:
        self.shapes[path] = allowed
        if isinstance(node, list):
            for n, item in enumerate(node):
                self._check(item, shape.below(allowed, n), (*path, n))
        if isinstance(node, str):
            self._note(node, [shape.names(one) for one in allowed], path)
        if not isinstance(node, dict):
            return
        if len(path) == 2 and path[0] in rooms:
            found = self._of_kind(node, str(path[0]), path)
            shapes = [] if found is None else [found]
        else:
            shapes = shape.of_mappings(allowed)
        if not shapes:
            return
        self._name_keys(node, path)
        known = {key: below for choice in shapes for key, below in _required_first(choice).items()}
        if all(choice.get("additionalProperties") is False for choice in shapes):
            self._mend(node, known, path)
        keys_name = [shape.names(one.get("propertyNames", {})) for one in shapes]
        for key in node:
            self._note(key, keys_name, (*path, key))
        for key in dict.fromkeys([*known, *node]):
            self._check(node.get(key), shape.below(shapes, key), (*path, key))

    def _note(self, name: str, what: Sequence[str], path: Path) -> None:
        self.names += [Named(path, name, one) for one in dict.fromkeys(what) if one]

    def _name_keys(self, node: dict[Any, Any], path: Path) -> None:
        if all(isinstance(key, str) for key in node):
            return
        for key in [key for key in node if not isinstance(key, str)]:
            text = "true (YAML reads yes, on and true as that)" if key is True else scalar_text(key)
            remedy = "Keys are text; put it in quotes."
            self.findings.append(Finding(self.written((*path, str(key))), f"the key is not text but {text}", remedy))
        items = [(str(key), value) for key, value in node.items()]
        node.clear()
        node.update(items)

    def _mend(self, node: dict[str, Any], allowed: Mapping[str, Any], path: Path) -> None:
        for key in [key for key in node if key not in allowed]:
            written = (*self.written(path), key if is_plain_key(key) else f"(key {list(node).index(key) + 1})")
            successor, remedy = _REPLACED.get(key, ("", ""))
            if successor in allowed:
                self.findings.append(Finding(written, f"is replaced by `{successor}`", remedy))
                self._unknown.add(written)
                del node[key]
                continue
            home = _home(key, allowed)
            near = f"It is a key of `{home}`. " if home else did_you_mean(key, allowed)
            remedy = f"{near}Allowed here: {', '.join(allowed)}.{_of_other_kinds(key, path)}"
            if written == ("qreward",):
                remedy = "Write the tree below `qreward` with no other key at the top, or leave `qreward` out."
            self.findings.append(Finding(written, "unknown key", remedy))
            self._unknown.add(written)
            value = node.pop(key)
            meant = None if home else nearest(key, allowed)
            if meant is not None and meant not in node:
                node[meant], place = value, (*path, meant)
                self._written[place] = str(written[-1])

    def _of_kind(self, node: dict[Any, Any], room: str, path: Path) -> Shape | None:
        """Return the shape of the node's kind, or of the kind that was probably meant; None if it cannot be loaded."""
        kind = node.get("kind")
        named = isinstance(kind, str) and bool(rooms[room].registrations(kind))
        chosen = kind if named else self._guessed(node, rooms[room].names, shape.of_kinds(room), path)
        if not isinstance(chosen, str):
            return None
        problem = remedy = ""
        try:
            return shape.of_kind(room, chosen)
        except KindError as error:
            problem, remedy = error.problem, error.remedy
        self.findings.append(Finding(self.written((*path, "kind")), problem, remedy))
        return None

    def _guessed(
        self, node: dict[Any, Any], names: Sequence[str], by_kind: Mapping[str, Shape], path: Path
    ) -> str | None:
        """Return the kind that was probably meant. `names` are the registered kinds, and `by_kind` has the shapes of
        those that can be loaded.
        """
        kind, place = node.get("kind"), (*path, "kind")
        guess = nearest(kind, names) if isinstance(kind, str) else None
        likely = [guess] if guess else _by_keys(node, by_kind)
        guess = likely[0] if len(likely) == 1 else None
        if "kind" in node:
            if not isinstance(kind, Broken):
                near = did_you_mean(kind, names) if isinstance(kind, str) else ""
                remedy = f"{near}Allowed here: {', '.join(names)}."
                self.findings.append(Finding(self.written(place), "unknown kind", remedy, f" {scalar_text(kind)}"))
        elif misspelt := nearest("kind", _strangers(node, by_kind)):
            value = node.pop(misspelt)
            self._written[place] = misspelt
            self._unknown.add(self.written(place))
            self.findings.append(Finding(self.written(place), "unknown key", "Did you mean `kind`?"))
            guess = value if isinstance(value, str) and value in names else guess
        else:
            options = " or ".join(f"`kind: {name}`" for name in likely or names)
            self.findings.append(Finding(self.written(place), "the key is missing", f"Add {options}."))
        if guess is None:
            return None
        node["kind"] = guess
        return guess


def _home(key: str, allowed: Mapping[str, Any]) -> str | None:
    """Return the allowed key whose mapping has `key`, for a key that stands one level too high; None if there is no
    such key, or more than one.
    """
    homes = [name for name, below in allowed.items() if key in _known_below(below)]
    return homes[0] if len(homes) == 1 else None


def _known_below(below: Any) -> set[str]:
    shapes = shape.of_mappings(shape.choices(below)) if isinstance(below, Mapping) else []
    return {key for one in shapes for key in one.get("properties", {})}


def _of_other_kinds(key: str, path: Path) -> str:
    """Return a sentence about the kinds that have a key which the kind of the node at `path` does not have, or ""."""
    if len(path) != 2 or path[0] not in rooms:
        return ""
    room = str(path[0])
    kinds = [kind for kind, choice in shape.of_kinds(room).items() if key in choice["properties"]]
    return f" Only {room} of kind {', '.join(kinds)} have this key." if kinds else ""


def _required_first(shape: Shape) -> dict[str, Shape]:
    """Return the allowed keys of a shape, required keys first. Messages list them in this order."""
    required, known = shape.get("required", ()), shape.get("properties", {})
    return {key: known[key] for key in sorted(known, key=lambda key: key not in required)}


def _strangers(node: Mapping[Any, Any], by_kind: Mapping[str, Shape]) -> list[str]:
    return [
        key
        for key in node
        if isinstance(key, str) and not any(key in choice["properties"] for choice in by_kind.values())
    ]


def _by_keys(node: Mapping[Any, Any], by_kind: Mapping[str, Shape]) -> list[str]:
    """Return the kinds that allow the most keys of the node: more than one if they tie."""
    counts = {kind: sum(key in choice["properties"] for key in node) for kind, choice in by_kind.items()}
    best = max(counts.values(), default=0)
    return [kind for kind, count in counts.items() if count == best]
