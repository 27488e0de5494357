"""Reads a YAML file into plain values, and remembers the line of each key.

The dialect is that of OmegaConf and Hydra: `1e3` is a number, dates stay text, a duplicate key is a mistake. Messages
show nothing of the file but names of keys, because any text of it may be a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]

from ..errors import ConfigurationError, Mistake
from .findings import Finding, Path, is_plain_key

MOST_BYTES = 2**20
"""Size of the largest file that is read, in bytes."""

_MERGE = "tag:yaml.org,2002:merge"
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


class FileTree(dict[str, Any]):
    """The plain values of a file. `lines` has the line of each key and item, from 1, by its path; `duplicates` are the
    keys that stand twice.
    """

    def __init__(self, values: Mapping[str, Any], lines: Mapping[Path, int], duplicates: Sequence[Finding]) -> None:
        super().__init__(values)
        self.lines = lines
        self.duplicates = duplicates

    def below(self, key: str) -> Any:
        """Return the mapping under `key`, or what else stands there."""
        if not isinstance(self[key], dict):
            return self[key]
        lines = {path[1:]: line for path, line in self.lines.items() if path[:1] == (key,)}
        return FileTree(self[key], lines, [finding._replace(path=finding.path[1:]) for finding in self.duplicates])


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads OmegaConf's dialect."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_yaml(path: str, *, origin: str) -> Any:
    """Return the plain values of a YAML file: a `FileTree`, or what else the file holds; None for an empty one.

    Raises `ConfigurationError` if the file does not exist, or is not UTF-8 or not YAML.
    """
    problem, remedy, data, line = "", "", b"", None
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        problem = f"the file cannot be read ({getattr(error, 'strerror', None) or 'not a path'})."
        remedy = f"Looked for {os.path.abspath(path)}."
    if len(data) > MOST_BYTES:
        problem = f"the file is larger than {MOST_BYTES // 2**20} MiB."
    if not problem:
        try:
            return _loaded(data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            problem, remedy = "the file is not UTF-8 text.", "Save it as UTF-8."
        except yaml.MarkedYAMLError as error:
            problem, remedy, line = _marked(error, data.decode("utf-8-sig").splitlines())
            if path.endswith(".jsonl"):
                remedy = "Rows are no configuration, which comes first in a command."
        except yaml.reader.ReaderError as error:
            # PyYAML counts from the byte order mark on, which is not part of the text here.
            line = data.decode("utf-8-sig").count("\n", 0, int(error.position)) + 1
            problem = "the file is not valid YAML: the line holds a character that YAML does not allow."
        except RecursionError:
            problem = "the file contains itself, or is nested too deeply."
        except Exception:
            # For an explicit tag (`!!int abc`), PyYAML raises any error of the conversion.
            problem = "the file is not valid YAML: a value does not fit its tag."
            remedy = "Leave out tags such as `!!int`, or put the text in quotes."
    raise ConfigurationError([Mistake("", problem, remedy, line)], origin=origin)


def _loaded(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        lines: dict[Path, int] = {(): node.start_mark.line + 1}
        duplicates: dict[int, Finding] = {}
        _note(node, (), loader, lines, duplicates)
        value = loader.construct_document(node)
    finally:
        loader.dispose()
    return FileTree(value, lines, list(duplicates.values())) if isinstance(value, dict) else value


def _note(node: yaml.Node, path: Path, loader: _Loader, lines: dict[Path, int], duplicates: dict[int, Finding]) -> None:
    """Note the lines of all that is below `node`, and the keys that stand twice in one mapping."""
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            here: Path = (*path, number)
            lines[here] = item.start_mark.line + 1
            _note(item, here, loader, lines, duplicates)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        # What `<<` merges comes first, because own keys override it.
        for key, value in sorted(node.value, key=lambda pair: bool(pair[0].tag != _MERGE)):
            if key.tag == _MERGE:
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    _note(merged, path, loader, lines, duplicates)
                continue
            name, line = str(loader.construct_object(key, deep=True)), key.start_mark.line + 1
            if name in seen:
                place = (*path, name if is_plain_key(name) else f"(key {len(seen) + 1})")
                problem = f"duplicate key; it stands in line {seen[name]}, too"
                duplicates[key.start_mark.index] = Finding(place, problem, "Merge the two, or rename one of them.")
            seen.setdefault(name, line)
            here = (*path, name)
            lines[here] = line
            _note(value, here, loader, lines, duplicates)


def _marked(error: yaml.MarkedYAMLError, text: list[str]) -> tuple[str, str, int | None]:
    """Return the problem, a remedy and the line."""
    mark, remedy = error.problem_mark or error.context_mark, ""
    if mark and mark.line < len(text) and "${" in text[mark.line]:
        remedy = "Within { } or [ ], put `${...}` in quotes."
    elif error.problem in ("could not find expected ':'", "mapping values are not allowed here"):
        remedy = "Put a blank after the colon of each key, and a text with a colon in quotes, in the lines before, too."
    what = error.problem or ""
    if what.startswith("but "):
        what = f"{error.context}, {what}"
    # Quoted parts of PyYAML's message come from the file, unless they are names of tokens.
    what = _QUOTED.sub(lambda quoted: quoted[0] if len(quoted[0]) <= 4 or quoted[0][1] == "<" else "something", what)
    place = f" (column {mark.column + 1})" if mark else ""
    return f"the file is not valid YAML: {what}{place}.", remedy, mark.line + 1 if mark else None
