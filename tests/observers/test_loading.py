"""`observers:` of a configuration: factories by path or by name, and what is said of those that cannot be used."""

from __future__ import annotations

import sys

import pytest

from qreward_plugins import ConfigurationError, RewardEngine, load_config
from qreward_plugins.simulation import run

MODULE = """
told = []


def make():
    return told.append


class Kept:
    def __init__(self):
        self.told = told

    def __call__(self, event):
        self.told.append(event)


def broken():
    raise ValueError("no\\nroom for it")


def leaves():
    raise SystemExit("bye")


def nothing():
    pass


async def late():
    return told.append


number = 3
"""


@pytest.fixture
def tree():
    return {
        "sources": {"a": {"kind": "openai", "base_url": "http://a.invalid/v1", "model": "m"}},
        "judges": {"quality": {"kind": "llm"}},
    }


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "watchers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "watchers"
    sys.modules.pop("watchers", None)


@pytest.fixture
def package(tmp_path, monkeypatch, module):
    """An installed package that registers the observers `board` and, twice, `both`."""
    for name, points in {
        "watchers-1.0": "board = watchers:make\nboth = watchers:make",
        "others-2.0": "both = watchers:Kept",
    }.items():
        info = tmp_path / f"{name.replace('-', '-')}.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name[:-4]}\nVersion: {name[-3:]}\n")
        info.joinpath("entry_points.txt").write_text(f"[qreward_plugins.observers]\n{points}\n")


def told_of(tree):
    async def main():
        async with RewardEngine(tree):
            pass

    run(main())
    return [type(event).__name__ for event in sys.modules["watchers"].told]


def problems(tree):
    with pytest.raises(ConfigurationError) as caught:
        RewardEngine(tree)
    assert caught.value.__cause__ is caught.value.__context__ is None
    return {mistake.path: str(mistake) for mistake in caught.value.mistakes}


def test_a_factory_is_called_and_what_it_returns_is_told(tree, package, tmp_path):
    (tmp_path / "own.py").write_text(MODULE.replace("told = []", "from watchers import told"))
    named = ["watchers:make", "watchers:Kept", "board", f"{tmp_path / 'own.py'}:make"]
    assert told_of({**tree, "observers": named}) == ["EngineClosed"] * 4
    assert told_of({**tree, "observers": "watchers:make"}) == ["EngineClosed"] * 5, "one needs no list"


def test_every_mistake_is_told_with_its_place(tree, module):
    said = problems(
        {
            **tree,
            "observers": [
                "watchers:make",
                "watchers:mak",
                "watcher:make",
                "watchers:number",
                "watchers:broken",
                "watchers:leaves",
                "watchers:nothing",
                "watchers:late",
            ],
        }
    )
    assert "watchers has no 'mak'; did you mean 'make'?" in said["observers[1]"]
    assert "there is no module 'watcher'" in said["observers[2]"]
    assert "not a function" in said["observers[3]"]
    assert "the factory watchers:broken raised ValueError: no\\nroom for it" in said["observers[4]"]
    assert "raised SystemExit: bye" in said["observers[5]"]
    assert "an object of type NoneType cannot be called" in said["observers[6]"]
    assert "the factory watchers:late is asynchronous" in said["observers[7]"]
    assert len(said) == 7


def test_an_unknown_name_is_told_with_the_known_ones(tree, package):
    said = problems({**tree, "observers": ["bord", "both"]})
    assert (
        "no package registers the observer 'bord'. Did you mean 'board'? Registered: board, both."
        in said["observers[0]"]
    )
    assert "several packages register the observer 'both': watchers:Kept and watchers:make" in said["observers[1]"]


@pytest.mark.parametrize("wrong", ["a b", "watchers:", ":make", "", 3, {"a": 1}])
def test_what_is_no_path_is_found_when_the_configuration_is_read(tree, wrong):
    with pytest.raises(ConfigurationError, match="observers"):
        load_config({**tree, "observers": [wrong]})
