"""`observers:` of a configuration: factories by path or by name, and what is said of those that cannot be used."""

from __future__ import annotations

import sys

import pytest

from qreward_plugins import ConfigurationError, RewardEngine
from qreward_plugins.simulation import run

from ..kit import make_config

MODULE = """
from qreward_plugins.errors import ConfigurationError, Mistake

told = []


def make():
    return told.append


class Kept:
    def __call__(self, event):
        told.append(event)


def broken():
    raise ValueError("no\\nroom for it")


def lacking():
    raise ConfigurationError([Mistake("observers", "no meter.", "Install one.")])


def nothing(): ...


"""


TREE = make_config("a")


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "watchers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "watchers"
    sys.modules.pop("watchers", None)


def told_of(observers):
    async def main():
        async with RewardEngine({**TREE, "observers": observers}):
            pass

    run(main())
    return [type(event).__name__ for event in sys.modules["watchers"].told]


def test_a_factory_is_called_and_what_it_returns_is_told(module, tmp_path):
    (tmp_path / "own.py").write_text(MODULE.replace("told = []", "from watchers import told"))
    named = ["watchers:make", "watchers:Kept", f"{tmp_path / 'own.py'}:make"]
    assert told_of(named) == ["EngineClosed"] * 3
    assert told_of("watchers:make") == ["EngineClosed"] * 4, "one needs no list"


def test_every_mistake_is_told_with_its_place(module):
    names = ["watchers:make", "watchers:mak", "watcher:make", "watchers:broken"]
    names += ["watchers:nothing", "watchers:lacking"]
    with pytest.raises(ConfigurationError) as caught:
        RewardEngine({**TREE, "observers": names})
    assert caught.value.__cause__ is caught.value.__context__ is None
    said = {mistake.path: str(mistake) for mistake in caught.value.mistakes}
    assert "watchers has no 'mak'; did you mean 'make'?" in said["observers[1]"]
    assert "there is no module 'watcher'" in said["observers[2]"]
    assert "the factory watchers:broken raised ValueError: no\\nroom for it" in said["observers[3]"]
    assert "returned an object of type NoneType, which cannot be called" in said["observers[4]"]
    assert said["observers"] == "observers: no meter. Install one.", "the factory has said it itself"
    assert len(said) == 5
