"""`engine.reload: on`: the file is looked at, and applied or refused as a whole. In real time."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest
import yaml

from qreward_plugins import ConfigurationError, RewardEngine
from qreward_plugins.engine import reloader
from qreward_plugins.simulation import SimulatedSource

from ..kit import make_config, make_sample, scored_text

ON = {"reload": True}


def tree(names, engine=None):
    return make_config(names, engine=engine)


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(reloader, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(reloader, "SETTLED_S", 0.02)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "judges.yaml"
    write(path, tree("a", engine=ON))
    return path


def write(path, config):
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))


def deadline(seconds):
    return tree("a", engine={**ON, "deadline_s": seconds})


async def comes(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


def play(file, main, *, begin=lambda: None):
    async def runs():
        sources = {
            name: SimulatedSource(name, behaviour=lambda *_: 0.0, answer=scored_text, model="m") for name in "ab"
        }
        async with RewardEngine(str(file), sources=sources) as engine:
            begin()
            await engine.score(make_sample())
            await main(engine)

    asyncio.run(runs())


def told(caplog, what):
    return [record.getMessage() for record in caplog.records if what in record.getMessage()]


def test_a_change_of_the_file_is_applied_and_told_once(file, caplog):
    async def main(engine):
        write(file, tree("b", engine=ON))
        await comes(lambda: list(engine.upstreams) == ["b"])
        assert (await engine.score(make_sample(1))).verdict.source == "b"
        # The same text in a new file, and another comment, are no news.
        write(file, "# again\n" + file.read_text())
        write(file.with_name("new"), deadline(9.0))
        os.replace(file.with_name("new"), file)
        await comes(lambda: engine.config.engine.deadline_s == 9.0)

    play(file, main)
    # At a level that Python shows without any configuration.
    first, *others = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert first.getMessage() == f"{file} was reloaded: sources.a: removed; sources.b: added"
    assert len(others) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sources: {a: {kind: openai", "YAML"),
        (tree("a", engine={"reload": True, "deadline_s": -1}), "engine.deadline_s"),
        (tree("a", engine={"reload": True, "shared": "off"}), "engine.shared: this change needs"),
    ],
    ids=["half", "value", "restart"],
)
def test_a_mistake_is_one_line_and_the_next_change_is_applied(file, caplog, text, said):
    async def main(engine):
        write(file, text)
        await comes(lambda: told(caplog, "was not reloaded"))
        assert list(engine.upstreams) == ["a"]
        (line,) = told(caplog, "was not reloaded")
        assert said in line
        assert "\n" not in line
        write(file, tree("b", engine=ON))
        await comes(lambda: list(engine.upstreams) == ["b"])

    play(file, main)


def test_without_a_file_the_engine_says_so():
    with pytest.raises(ConfigurationError, match="no file that could be watched"):
        RewardEngine(tree("a", engine=ON))


def test_a_file_is_relinked_gone_and_half_written(tmp_path):
    # As Kubernetes lays out a ConfigMap.
    for version, seconds in (("1", 1.0), ("2", 2.0)):
        (tmp_path / version).mkdir()
        write(tmp_path / version / "judges.yaml", deadline(seconds))
    (tmp_path / "..data").symlink_to("1")
    file = tmp_path / "judges.yaml"
    file.symlink_to("..data/judges.yaml")

    async def main(engine):
        (tmp_path / "..new").symlink_to("2")
        os.replace(tmp_path / "..new", tmp_path / "..data")
        await comes(lambda: engine.config.engine.deadline_s == 2.0)
        file.unlink()
        await asyncio.sleep(0.05)
        whole = yaml.safe_dump(deadline(3.0))
        with file.open("w") as half:
            half.write(whole[:40])
            half.flush()
            await asyncio.sleep(0)
            half.write(whole[40:])
        await comes(lambda: engine.config.engine.deadline_s == 3.0)

    play(file, main)
