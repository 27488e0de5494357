"""A judge that does what the last word of a response says, and its configuration."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from qreward_plugins.engine.process_portals import close_process_portals
from qreward_plugins.testing import JudgeServer

from ..kit import by_word, make_config


@pytest.fixture
def tree():
    """A configuration whose judge gives each number as it is. A refused call costs no second try."""
    with JudgeServer(by_word) as server:
        yield make_config({"a": server}, judge={"score_range": [0, 1]})
        close_process_portals()


RULES = """
seen = []


def score(sample):
    seen.append(sample)
    return {"score": 1.0, "words": float(len(sample.response.split()))}
"""


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """A configuration with a function that keeps the samples it scores, and the list of these."""
    (tmp_path / "rules_of_bridges.py").write_text(RULES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rules_of_bridges", raising=False)
    source = {"kind": "function", "function": "rules_of_bridges:score", "mode": "thread", "arguments": "sample"}
    tree = {"sources": {"rules": source}, "judges": {"exact": {"kind": "function"}}}
    yield tree, lambda: sys.modules["rules_of_bridges"].seen
    close_process_portals()


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a configuration where the pages look for it, and goes there."""

    def write(tree):
        path = tmp_path / "judges.yaml"
        path.write_text(yaml.safe_dump(tree))
        monkeypatch.chdir(tmp_path)
        return path

    return write


@pytest.fixture
def block():
    """The one code block of a language in a part of the page for these libraries."""
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()

    def found(part, language):
        (text,) = re.findall(rf"```{language}\n(.*?)```", page.split(f"\n## {part}\n")[1].split("\n## ")[0], re.DOTALL)
        return text

    return found


@pytest.fixture
def imported(monkeypatch):
    """Imports a bridge over the names of its library that it takes, by module, where the library need not be there."""

    def imports(bridge, stand_ins):
        for name, held in stand_ins.items():
            module = ModuleType(name)
            vars(module).update(held)
            monkeypatch.setitem(sys.modules, name, module)
        name = f"qreward_plugins.bridges.{bridge}"
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(name)
        return sys.modules.pop(name)

    return imports
