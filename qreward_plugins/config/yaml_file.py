"""Reads a YAML file into plain values, and reports mistakes without quoting the values of the file.

PyYAML's messages quote the wrong line, which may hold a secret; so a message here has only the line number and the
column. The dialect is that of OmegaConf and Hydra: `1e3` is a number, dates stay text, a duplicate key is a mistake.
"""

from __future__ import annotations

import os
import re
from typing import Any

import yaml  # type: ignore[import-untyped]

from ..errors import ConfigurationError, Mistake
from .findings import is_plain_key
from .interpolations import MOST_VALUES

_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


MOST_BYTES = 2**20
"""Size of the largest file that is read, in bytes."""

ROLLOUT_SUFFIXES = (".jsonl", ".parquet")
"""Endings of files of rollouts."""

MOST_DIGITS = 4_000
"""Most characters of an integer."""


class _TooManyValues(Exception):
    """Aliases repeat parts of the file so often that it holds more than `MOST_VALUES` values."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"duplicate key{_shown(key.value)}", problem_mark=key.start_mark
                    )
                seen.add((key.tag, key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    # YAML 1.1 reads 1:30 as 90. So it reads a megabyte of digits and colons as one number, in quadratic time.
    if len(node.value) > MOST_DIGITS:
        raise ValueError
    return loader.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
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
    """Return the plain values of a YAML file: mappings, lists and scalars; None for an empty file.

    Raises `ConfigurationError` if the file does not exist, or is not UTF-8 or not YAML.
    """
    problem, remedy, data = "", "", b""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        problem, remedy = "there is no such file.", f"Looked for {os.path.abspath(path)}."
    except IsADirectoryError:
        problem, remedy = "this is a directory.", "Name a YAML file."
    except PermissionError:
        problem, remedy = "this process may not read the file.", "Check its permissions."
    except (OSError, ValueError) as error:
        problem = f"the file cannot be read ({getattr(error, 'strerror', None) or 'not a path'})."
    if len(data) > MOST_BYTES:
        problem = f"the file is larger than {MOST_BYTES // 2**20} MiB."
    if problem:
        raise ConfigurationError([Mistake("", problem, remedy)], origin=origin)
    try:
        return _loaded(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem, remedy = f"the file is not UTF-8 text (line {line}).", "Save it as UTF-8."
    except yaml.MarkedYAMLError as error:
        problem, remedy = _marked(error, data.decode("utf-8-sig").splitlines())
    except yaml.reader.ReaderError as error:
        # PyYAML counts from the byte order mark on, which is not part of the text here.
        line = data.decode("utf-8-sig").count("\n", 0, int(error.position)) + 1
        problem = f"the file is not valid YAML: line {line} holds a character that YAML does not allow."
    except RecursionError:
        problem = "the file is nested too deeply."
    except _TooManyValues:
        problem = f"its aliases (`*name`) expand to more than {MOST_VALUES:,} values."
        remedy = "Use fewer aliases, and do not nest them."
    except Exception:
        # For an explicit tag (`!!int abc`), PyYAML raises any error of the conversion.
        problem = "the file is not valid YAML: a value does not fit its tag."
        remedy = "Leave out tags such as `!!int`, or put the text in quotes."
    if os.fspath(path).endswith(ROLLOUT_SUFFIXES):
        # The arguments of a command were swapped.
        remedy = "Rollouts have this ending; name a configuration in YAML."
    raise ConfigurationError([Mistake("", problem, remedy)], origin=origin)


def _loaded(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}) > MOST_VALUES:
            raise _TooManyValues
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _values(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Count the values of a node. Values behind an alias count at each use."""
    if node in known:
        return known[node]
    # This ends the recursion for an alias inside the node that it names. A later check reports that.
    known[node] = 1
    if isinstance(node, yaml.MappingNode):
        count = 1 + sum(_values(key, known) + _values(value, known) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        count = 1 + sum(_values(item, known) for item in node.value)
    else:
        count = 1
    known[node] = count
    return count


def _shown(key: str) -> str:
    """Return the name of a key for a message; "" for a text that is no name, because it may be a misplaced secret."""
    return f" `{key}`" if is_plain_key(key) else ""


def _marked(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[str, str]:
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "place unknown"
    what, remedy = error.problem or "", ""
    if "undefined alias" in what:
        what = "`*` starts an undefined alias"
        remedy = "Put a text that starts with `*` in quotes."
    elif "for the tag" in what or "tag handle" in what:
        what = "`!` starts an unknown tag"
        remedy = "Put a text that starts with `!` in quotes."
    elif "that cannot start any token" in what:
        at = error.problem_mark
        if at and at.line < len(lines) and lines[at.line][at.column : at.column + 1] == "\t":
            what, remedy = "a tab", "Indent with spaces."
        else:
            what = "found a character that cannot start a value"
            remedy = "Put a text that starts with a special character in quotes."
    elif "found another document" in what:
        what, remedy = "`---` starts a second document", "Keep one document in the file."
    elif "'<stream end>'" in what:
        what, remedy = "the file ends within a list or a mapping", "Close it, or save the whole file."
    elif what.startswith("duplicate key"):
        remedy = "Merge the two, or rename one of them."
    elif mark and mark.line < len(lines) and "${" in lines[mark.line]:
        remedy = "Within { } or [ ], put `${...}` in quotes."
    # Quoted parts of PyYAML's message come from the file, unless they are names of tokens.
    what = _QUOTED.sub(lambda quoted: quoted[0] if len(quoted[0]) <= 3 or quoted[0][1] == "<" else "something", what)
    return f"the file is not valid YAML: {what} ({place}).", remedy
