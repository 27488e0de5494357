"""Checks a tree of plain values: returns the `Config`, or all mistakes at once.

pydantic is the only validator. A misspelt key is reported as one mistake; its value then moves to the key that was
meant and the tree is validated again, so that the values below are still checked and the right key is not missing.

pydantic's errors are not passed on, because they hold the input, which may contain secrets.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .findings import HABITS, Finding, Path, cut, did_you_mean, is_plain_key, letters, nearest, path_text
from .models import Config
from .names import Names
from .registry import KindError, Kinds, rooms
from .resolve import Unresolved

START = "It starts with the keys `sources` and `judges`."
_OF_SERVER = {
    (): ("sources", "judges", "routes"),
    ("engine",): ("ask_once", "budget", "journal", "max_attempts", "scheduling"),
}
"""The keys that a reward server has, by the mapping in which they stand."""

_WORDS = {
    "missing": "the key is missing",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "float_parsing": "must be a number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "too_short": "is empty, or too short",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be {ge:g} or more",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be {le:g} or less",
    "union_tag_invalid": "{discriminator} must be one of {expected_tags}",
    "union_tag_not_found": "the key {discriminator} is missing",
}
"""Our words for pydantic's types of errors. Other messages are pydantic's own, which do not quote the value."""
_OURS = {"reference", "takes", "no_number", "literal_error"}
"""Types of errors whose words may have the value in them, as an allowed one."""
_LARGEST_SHOWN = 10**15
"""Any other number that is not where a text belongs is shown."""
_OTHER_UNIT = re.compile(r"_(ms|millis|minutes|hours|per_(s|sec|second|hour|day))$")
"""The end of a key with a unit that no key of ours has."""
_MAPPINGS = ("model_type", "dict_type")
_FORMS = {*_MAPPINGS, "tuple_type", "list_type", "string_type"}
"""Types of errors in the form of a value. What stands below a misspelt key may be meant in another form."""


def check(tree: dict[str, Any]) -> tuple[Config | None, list[Finding]]:
    """Return the configuration, or None and the findings. `tree` belongs to this function; values that were not
    resolved are `Unresolved`, and nothing is said of them.
    """
    known = Config.model_fields
    if not any(key in known or nearest(key, known) or letters(key) in HABITS for key in tree):
        # Probably another file, of which nothing is shown.
        count = "only top-level key is unknown" if len(tree) == 1 else f"{len(tree):,} top-level keys are unknown"
        return None, [Finding((), f"the {count}", f"Allowed here: {', '.join(known)}.")]
    checking = _Checking(tree)
    config = checking.validated()
    return config, list(checking.findings.values())


class _Checking:
    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree
        self.findings: dict[tuple[Path, str], Finding] = {}
        """The first finding of each key, and of each value, by its path in the file."""
        self._written: dict[Path, Path] = {}
        self._unchecked: set[Path] = set()
        """Nodes without a known kind, and what is written with the key of another tool."""

    def validated(self) -> Config | None:
        """Return the configuration, or None if `findings` are not all that there is to it."""
        while True:
            served = self._is_served()
            self._mend_kinds()
            config, names, errors = None, Names(self.tree), []
            try:
                config = Config.model_validate(self.tree, context=names)
            except ValidationError as failure:
                errors = failure.errors(include_url=False)
            strange = [error for error in errors if error["type"] == "extra_forbidden"]
            # What a validator has made of a value may have a key that is not in the tree.
            unknown = [path for error in strange if (path := _path(error, self.tree))[-1:] == error["loc"][-1:]]
            if not unknown:
                break
            for path in dict.fromkeys(unknown):
                self._mend_key(path)
        paths = [_path(error, self.tree) for error in errors]
        for path, error in zip(paths, errors, strict=True):
            # Above another mistake, pydantic counts the entries that are right, or tries another member of a union.
            if not any(len(other) > len(path) and other[: len(path)] == path for other in paths):
                self._note(path, error)
        for room in rooms if not served else ():
            needed = room == "sources" or not self.tree.get("models")
            if needed and not self.tree.get(room) and (room,) not in self._unchecked:
                problem = "must be a mapping with at least one entry" if room in self.tree else "the key is missing"
                hint = "" if room == "sources" else " Only a file for clients, with `models`, needs none."
                self._add((room,), problem, f"Add the {room}, by name.{hint}")
        budget = None if config is None else config.engine.budget
        if config is not None and budget is not None and all(node.price.is_zero for node in config.sources.values()):
            self._add(("engine", "budget"), "no source has a price to count by", "Set `sources.NAME.price`.")
        for finding in names.findings([path for path, _ in self.findings]):
            self._add(*finding)
        return config

    def _add(self, path: Path, problem: str, remedy: str = "") -> None:
        written = self._in_file(path)
        self.findings.setdefault((written, "value"), Finding(written, problem, remedy))

    def _in_file(self, path: Path) -> Path:
        """Return the path with the keys as they are spelt in the file."""
        for n in range(len(path), 0, -1):
            if path[:n] in self._written:
                return (*self._written[path[:n]], *path[n:])
        return path

    # Values

    def _note(self, path: Path, error: ErrorDetails) -> None:
        kind, value, context = error["type"], error["input"], error.get("ctx", {})
        if isinstance(value, Unresolved) or path in self._unchecked or (path in self._written and kind in _FORMS):
            return
        own = kind in ("value_error", "assertion_error")
        if kind in _WORDS:
            problem = _WORDS[kind].format_map(context)
        else:
            problem = str(context["error"]) if own else re.sub(r"^\w+ should", "must", error["msg"])
            if isinstance(value, str) and value and kind not in _OURS:
                # The words of another package's validator.
                problem = problem.replace(value, "***")
        remedy = str(context.get("remedy", ""))
        if kind == "missing":
            remedy = _first_sentence(self._fields_at(path[:-1]).get(str(path[-1])))
        elif kind == "string_type" and isinstance(value, (bool, int, float)):
            remedy = "Put it in quotes."
        elif kind in _MAPPINGS and (fields := self._fields_at(path)):
            keys = sorted(fields, key=lambda name: not fields[name].is_required())
            form = (
                "Write `{}: ...` below it." if kind == "model_type" else "Write a name below it, and `{}: ...` there."
            )
            remedy = f"{form.format(keys[0])} Its keys: {', '.join(keys)}."
        elif kind == "literal_error" and isinstance(value, str):
            allowed = re.findall(r"'([^']*)'", str(context["expected"]))
            remedy = did_you_mean(value, allowed).rstrip()
            problem += f", not '{cut(value)}'" if remedy else ""
        if isinstance(value, (bool, int, float)) and abs(value) < _LARGEST_SHOWN and not own and kind != "string_type":
            problem += f", not {str(value).lower()}"
        self._add(path, problem.rstrip("."), remedy)

    # Keys

    def _mend_key(self, path: Path) -> None:
        """Report an unknown key, and take it out. The value of a misspelt one moves to the key that was meant."""
        above, key = path[:-1], str(path[-1])
        node, fields = _value(self.tree, above), self._fields_at(above)
        written = (*self._in_file(above), key if is_plain_key(key) else f"(key {list(node).index(key) + 1})")
        value, near = node.pop(key), nearest(key, set(fields) - {key})
        if not above and isinstance(value, dict) and "kind" in value:
            remedy = "Indent it, to stand below `sources` or `judges`."
        elif target := self._meant(key, above, fields):
            field = self._fields_at(target[:-1])[str(target[-1])]
            short = target[len(above) :] if target[: len(above)] == above else target
            remedy = f"Write `{path_text(short)}`. {_first_sentence(field)}".rstrip()
            # It is not missing, and what is written for another tool may have another form.
            self._unchecked.add(target)
        elif near is not None:
            unit = _OTHER_UNIT.search(key)
            remedy = f"Did you mean `{near}`?{' The unit differs.' if unit else ''}"
            if near not in node and not unit:
                node[near], place = value, (*above, near)
                self._written[place] = written
        else:
            remedy = f"Allowed here: {', '.join(sorted(fields, key=lambda name: not fields[name].is_required()))}."
        self.findings.setdefault((written, "key"), Finding(written, "unknown key", remedy))

    def _meant(self, key: str, above: Path, fields: Mapping[str, FieldInfo]) -> Path:
        """Return the path of the key that is meant by a key of another tool, or one that belongs into a mapping beside
        it; () for none.
        """
        entry = above[:2] if above and above[0] in rooms else ()
        targets = [path if path[0] == "engine" else (*entry, *path) for path in HABITS.get(letters(key), ())]
        targets += [(*above, n, key) for n, f in fields.items() if key in _fields(_models(f.annotation, direct=True))]
        return next((path for path in targets if path[-1] in self._fields_at(path[:-1])), ())

    def _fields_at(self, path: Path) -> dict[str, FieldInfo]:
        """Return the fields of the models that a mapping at `path` may have."""
        models: list[type[BaseModel]] = [Config]
        for n, key in enumerate(path):
            if n == 1 and path[0] in rooms:
                node = _value(self.tree, path[:2])
                try:
                    models = [rooms[str(path[0])].load(str(node["kind"])).Config] if isinstance(node, dict) else []
                except (KindError, KeyError):
                    models = []
            elif key in _fields(models):
                models = _models(_fields(models)[str(key)].annotation)
        return _fields(models)

    # Kinds

    def _mend_kinds(self) -> None:
        """Report wrong kinds, and replace each by the kind that was probably meant."""
        for room, kinds in rooms.items():
            nodes = self.tree.get(room)
            for name, node in nodes.items() if isinstance(nodes, dict) else ():
                if isinstance(node, dict) and not self._has_kind((room, name), node, kinds):
                    self._unchecked.add((room, name))

    def _has_kind(self, path: Path, node: dict[str, Any], kinds: Kinds[Any]) -> bool:
        """Return whether `node` has a kind that can be used, perhaps after its spelling was mended."""
        place, kind = (*path, "kind"), node.get("kind")
        if isinstance(kind, Unresolved):
            return False
        if "kind" not in node:
            self._add(place, "the key is missing", f"Add one of: {', '.join(kinds.names)}.")
            return False
        # The text of a mapping may hold a key, and would pass for a path.
        name = kind if isinstance(kind, str) else ""
        near = None if kinds.registrations(name) else nearest(name, kinds.names)
        if near is not None:
            remedy = f"Did you mean `{near}`? Allowed here: {', '.join(kinds.names)}."
            self._add(place, f"unknown kind `{cut(name)}`", remedy)
            node["kind"] = near
        try:
            return bool(kinds.load(near or name))
        except KindError as error:
            self._add(place, error.problem, error.remedy)
            return False

    def _is_served(self) -> bool:
        """Return whether a reward server scores. What counts at the server only is reported, and taken out."""
        engine = self.tree.get("engine")
        if not isinstance(engine, dict) or engine.get("server") is None:
            return False
        for above, keys in _OF_SERVER.items():
            node = _value(self.tree, above)
            for key in keys:
                if node.pop(key, None):
                    problem = "the reward server of `engine.server` has its own"
                    self._add((*above, key), problem, "Remove it here, and set it in the server's file.")
        return True


def _path(error: ErrorDetails, tree: Any) -> Path:
    """Return the path in `tree` of an error of pydantic. pydantic's own path has the members of unions, too, and what
    validators make of a value.
    """
    path: Path = ()
    for n, key in enumerate(error["loc"]):
        keys: Container[Any] = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
        if key in keys:
            path, tree = (*path, key), tree[key]
        elif error["type"] == "missing" and n == len(error["loc"]) - 1:
            path = (*path, key)
    return path


def _value(tree: Any, path: Path) -> Any:
    """Return the value at `path`; None if there is none."""
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(key)
        elif isinstance(tree, list) and isinstance(key, int) and 0 <= key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def _models(annotation: Any, *, direct: bool = False) -> list[type[BaseModel]]:
    """Return the models in a type: `Limits | None`, `dict[str, Route]`. `direct`: not those in mappings and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if direct and get_origin(annotation) in (dict, tuple, list):
        return []
    return [model for part in get_args(annotation) for model in _models(part, direct=direct)]


def _fields(models: Sequence[type[BaseModel]]) -> dict[str, FieldInfo]:
    return {name: field for model in models for name, field in model.model_fields.items()}


def _first_sentence(field: FieldInfo | None) -> str:
    words = " ".join(((field and field.description) or "").partition("\n\n")[0].split())
    return f"{re.split(r'[.] (?=[A-Z])|; ', words)[0].rstrip('.')}." if words else ""
