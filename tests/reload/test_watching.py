"""`engine.reload: on`: the file is watched, and applied or refused as a whole."""

from __future__ import annotations

import asyncio
import logging
import os

import anyio
import pytest
import yaml
from reload_stage import Stage, batch, sample, tree

from qreward_plugins import ConfigurationError, RewardEngine
from qreward_plugins.engine import reloader, watcher
from qreward_plugins.engine.watcher import watch_file

ON = {"reload": True}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "judges.yaml"
    path.write_text(yaml.safe_dump(tree("a", engine=ON)))
    return path


class Told:
    """A watch that tells of a change when `tell` is called."""

    def __init__(self):
        self.changes = asyncio.Queue()
        self.watched = []

    async def __call__(self, file):
        self.watched.append(file)
        yield
        while True:
            yield await self.changes.get()

    async def tell(self):
        self.changes.put_nowait(None)
        for _ in range(5):
            await asyncio.sleep(0)


def play(file, main):
    stage = Stage()

    async def begin(engine):
        told = engine._reloader._watch = Told()
        await engine.score(sample())
        return await main(engine, told)

    return stage.play(str(file), begin)


def test_a_change_of_the_file_is_applied(file, caplog):
    async def main(engine, told):
        file.write_text(yaml.safe_dump(tree("b", engine=ON)))
        await told.tell()
        assert told.watched == [str(file)]
        return (await engine.score(sample(1))).verdict.source

    assert play(file, main) == "b"
    # Once, at a level that Python shows without any configuration.
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.getMessage() == f"{file} was reloaded: sources.a: removed; sources.b: added (openai)"


def test_a_change_between_the_reading_of_the_file_and_the_first_sample_is_applied(file, caplog):
    stage = Stage()

    async def begin(engine):
        engine._reloader._watch = Told()
        file.write_text(yaml.safe_dump(tree("b", engine=ON)))
        engine.dispatcher()
        for _ in range(5):
            await asyncio.sleep(0)
        return (await engine.score(sample())).verdict.source

    assert stage.play(str(file), begin) == "b"
    assert caplog.text.count("was reloaded") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sources: {a: {kind: openai", "not valid YAML"),
        ("", "configuration is empty"),
        (yaml.safe_dump(tree("a", engine={"reload": True, "deadline_s": -1})), "engine.deadline_s"),
        (
            yaml.safe_dump(tree("a", engine={"reload": True, "shared": "off"})),
            "engine.shared: this change needs",
        ),
        (None, "no such file"),
    ],
    ids=["half", "empty", "value", "restart", "gone"],
)
def test_a_mistake_is_one_line_and_the_next_change_is_applied(file, caplog, text, said):
    async def main(engine, told):
        scoring = batch(engine, 5)
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        await told.tell()
        assert list(engine.upstreams) == ["a"]
        (record,) = [each for each in caplog.records if "was not reloaded" in each.message]
        assert said in record.message
        assert "\n" not in record.message
        file.write_text(yaml.safe_dump(tree("b", engine=ON)))
        await told.tell()
        assert list(engine.upstreams) == ["b"]
        await scoring

    play(file, main)


def test_it_is_turned_off_by_the_file(file):
    async def main(engine, told):
        file.write_text(yaml.safe_dump(tree("a")))
        await told.tell()
        file.write_text(yaml.safe_dump(tree("b")))
        await told.tell()
        assert list(engine.upstreams) == ["a"]
        await engine.reload()
        assert list(engine.upstreams) == ["b"]

    play(file, main)


def test_a_secret_is_in_no_line(file, caplog):
    caplog.set_level(logging.INFO, "qreward_plugins")

    async def main(engine, told):
        changed = tree("a", engine=ON)
        changed["sources"]["a"] |= {"api_key": "sk-secret-1", "headers": {"X-Team": "sk-secret-2"}}
        file.write_text(yaml.safe_dump(changed))
        await told.tell()
        changed["sources"]["a"] |= {"api_key": "sk-secret-3", "parameters": {"user": "sk-secret-4"}}
        file.write_text(yaml.safe_dump(changed))
        await told.tell()

    play(file, main)
    assert "sources.a.api_key: added; " in caplog.text
    assert "sk-secret" not in caplog.text


def test_without_the_package_or_the_file_the_engine_says_so(file, monkeypatch):
    with pytest.raises(ConfigurationError, match="no file that could be watched"):
        RewardEngine(tree("a", engine=ON))
    monkeypatch.setattr(reloader, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r'pip install "qreward-plugins\[reload\]"'):
        RewardEngine(str(file))


@pytest.mark.anyio
async def test_real_files_are_replaced_relinked_gone_and_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr(watcher, "SETTLED_S", 0.05)
    # A change before the system reports changes is found by the next look.
    monkeypatch.setattr(watcher, "LOOK_EVERY_S", 0.2)
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "judges.yaml").write_text(version)
    (tmp_path / "..data").symlink_to("1")
    file = tmp_path / "judges.yaml"
    file.symlink_to("..data/judges.yaml")
    told = asyncio.Queue()

    async def follow():
        async for _ in watch_file(str(file)):
            told.put_nowait(file.read_text())

    async def next_told():
        with anyio.fail_after(10):
            return await told.get()

    following = asyncio.ensure_future(follow())
    try:
        assert await next_told() == "1"
        await asyncio.sleep(0.1)
        assert not following.done(), following.exception()
        # As Kubernetes changes a ConfigMap.
        (tmp_path / "..new").symlink_to("2")
        os.replace(tmp_path / "..new", tmp_path / "..data")
        assert await next_told() == "2"
        # As an editor saves.
        (tmp_path / "saved").write_text("3")
        os.replace(tmp_path / "saved", file)
        assert await next_told() == "3"
        # Gone for a moment, then written in two parts.
        file.unlink()
        await asyncio.sleep(0.2)
        with file.open("w") as half:
            half.write("4")
            half.flush()
            await asyncio.sleep(0.02)
            half.write("4")
        assert await next_told() == "44"
        # The same again is no news.
        file.write_text("44")
        await asyncio.sleep(0.4)
        assert told.empty()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
