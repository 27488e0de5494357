"""Another configuration for an engine that runs, in virtual time: what changes at once, drains, or is refused."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest
import yaml

from qreward_plugins import ConfigurationError, RewardEngine, Scored
from qreward_plugins.config import load_config, load_layers
from qreward_plugins.config.load import origin_of, with_framework
from qreward_plugins.engine import reloader
from qreward_plugins.engine.difference import difference
from qreward_plugins.journal.keys import question_keys
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources.openai import OpenAISource

from ..kit import MemoryJournal, Stage, comes, in_virtual_time, make_config, make_sample, make_samples, now, scored_text


def tree(*names, judge=None, **options):
    return make_config(names, judge={"score_range": [0, 1], **(judge or {})}, **options)


def answer(request):
    return scored_text(request, 0.25)


def staged(names="a", **seconds):
    """Sources of these names, which take a second unless `seconds` says otherwise."""
    return Stage({name: seconds.get(name, 1.0) for name in names}, answer=answer)


def play(stage, config, main):
    stage.tree = config
    return stage.run(main)


def times(stage, name):
    return [each.at for each in stage.sent if each.source == name]


NO_HEDGE = {"scheduling": {"hedge": False}}


def batch(engine, count, **options):
    return asyncio.ensure_future(engine.score_all(make_samples(count), **options))


def most_in(times, window_s):
    return max((sum(at <= other < at + window_s for other in times) for at in times), default=0)


def test_a_limit_that_falls_holds_at_once_and_what_was_spent_counts():
    stage = staged()

    async def main(engine):
        scoring = batch(engine, 40)
        await asyncio.sleep(1.5)
        assert len(stage.sent) == 20
        found = await engine.reload(tree("a", limits={"a": {"requests_per_minute": 5, "concurrency": 64}}))
        assert [change.path for change in found.changes] == ["sources.a.limits.requests_per_minute"]
        assert (found.changes[0].before, found.changes[0].after, found.changes[0].restart) == ("20", "5", False)
        return await scoring

    outcomes = play(stage, tree("a", limits={"a": {"requests_per_minute": 20, "concurrency": 64}}), main)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    late = [at for at in times(stage, "a") if at > 1.5]
    assert late[0] > 60
    assert most_in(late, 60) == 5
    assert len(stage.sent) == 40


def test_waiting_samples_go_to_a_source_that_was_added():
    stage = staged("ab")

    async def main(engine):
        scoring = batch(engine, 30)
        await asyncio.sleep(1.5)
        found = await engine.reload(tree("a", "b", limits={"a": {"requests_per_minute": 10}}))
        assert str(found) == "sources.b: added"
        return await scoring

    outcomes = play(stage, tree("a", limits={"a": {"requests_per_minute": 10}}), main)
    assert {outcome.verdict.source for outcome in outcomes} == {"a", "b"}
    assert len(stage.sent) == 30
    assert max(times(stage, "b")) < 10


def test_a_removed_source_drains_and_its_waiting_samples_go_elsewhere():
    stage = staged("ab", a=15.0)

    async def main(engine):
        scoring = batch(engine, 12)
        await asyncio.sleep(1.5)
        found = await engine.reload(tree("b", engine=NO_HEDGE))
        assert str(found) == "sources.a: removed; sources.b: added"
        assert list(engine.upstreams) == ["b"]
        return await scoring

    outcomes = play(stage, tree("a", limits={"a": {"concurrency": 4}}, engine=NO_HEDGE), main)
    assert [outcome.verdict.source for outcome in outcomes].count("a") == 4
    assert times(stage, "a") == [0.0] * 4
    assert len(times(stage, "b")) == 8
    assert all(isinstance(outcome, Scored) for outcome in outcomes)


def test_samples_under_way_end_by_the_judges_they_began_with():
    stage = staged(a=5.0)

    async def main(engine):
        scoring = batch(engine, 2)
        await asyncio.sleep(1)
        await engine.reload(tree("a", judge={"reward_range": [0, 100], "correct_at": 20}))
        return await scoring, await engine.score(make_sample(9))

    before, after = play(stage, tree("a"), main)
    assert [outcome.reward for outcome in before] == [0.25, 0.25]
    assert [outcome.verdict.correct for outcome in before] == [None, None]
    assert (after.reward, after.verdict.correct) == (25.0, True)


def test_numbers_are_shown_and_no_text():
    before, after = tree("a"), tree("a")
    after["sources"]["a"] |= {"weight": 2.5, "model": "sk-1", "parameters": {"seed": 12345}}
    found = str(difference(load_config(before), load_config(after)))
    assert "sources.a.weight: 1 -> 2.5" in found
    assert "sources.a.model: changed" in found
    assert "sk-1" not in found
    assert "12345" not in found


def budgeted(usd):
    return tree("a", source={"price": {"per_request": 0.01}, "budget": {"usd": usd}})


@pytest.mark.parametrize(
    ("given", "change", "path"),
    [
        (tree("a"), {"engine": {"seed": 7, "journal": {"path": "x.sqlite"}}}, "engine.journal"),
        (tree("a"), {"groups": {"wait_s": 7}}, "groups.wait_s"),
        (tree("a"), budgeted(2), "sources.a.budget"),
        (budgeted(1), budgeted(2), "sources.a.budget.usd"),
    ],
)
def test_what_needs_a_restart_is_refused_as_a_whole_by_name(given, change, path):
    stage = staged()

    async def main(engine):
        before = engine.config
        with pytest.raises(ConfigurationError, match="needs a restart") as error:
            await engine.reload({**tree("a", "b"), **change})
        assert [mistake.path for mistake in error.value.mistakes] == [path]
        assert engine.config is before
        assert list(engine.upstreams) == ["a"]

    play(stage, given, main)


@pytest.mark.parametrize("wrong", [{"sources": {"a": {"kind": "openai"}}}, tree("a", judge={"sources": "nobody"})])
def test_mistakes_are_raised_and_nothing_changes(wrong):
    stage = staged()

    async def main(engine):
        scoring = batch(engine, 5)
        await asyncio.sleep(0.5)
        before = (engine.config, engine.judges, dict(engine.upstreams))
        with pytest.raises(ConfigurationError):
            await engine.reload(wrong)
        assert (engine.config, engine.judges, dict(engine.upstreams)) == before
        return await scoring

    assert all(isinstance(outcome, Scored) for outcome in play(stage, tree("a"), main))


def test_a_rotated_key_keeps_the_window_of_its_source():
    stage = staged()
    config = tree("a", limits={"a": {"requests_per_minute": 10, "concurrency": 64}})
    config["sources"]["a"]["api_key"] = "sk-first"

    async def main(engine):
        engine._lifetime.given = {}
        await batch(engine, 10)
        before = engine.upstreams["a"]
        rotated = {**config, "sources": {"a": {**config["sources"]["a"], "api_key": "sk-second"}}}
        found = await engine.reload(rotated)
        assert str(found) == "sources.a.api_key: changed"
        after = engine.upstreams["a"]
        assert after.source is not before.source
        assert after.quota.requests.spent(now()) == 10

    play(stage, config, main)


MOVED = tree("b", limits={"b": {"requests_per_minute": 10, "concurrency": 64}})
MOVED["sources"]["b"]["base_url"] = "http://a.invalid/v1"
OTHER = tree("b", limits={"b": {"requests_per_minute": 1}})


@pytest.mark.parametrize(("reloads", "names"), [([MOVED], "ab"), ([OTHER, None], "a")], ids=["renamed", "returns"])
def test_a_source_that_is_renamed_or_comes_back_keeps_its_window(reloads, names):
    stage = staged("ab")
    config = tree("a", limits={"a": {"requests_per_minute": 10, "concurrency": 64}})

    async def main(engine):
        scoring = batch(engine, 20)
        for changed in reloads:
            await asyncio.sleep(1.5)
            await engine.reload(changed or config)
        return await scoring

    assert all(isinstance(outcome, Scored) for outcome in play(stage, config, main))
    assert most_in([each.at for each in stage.sent if each.source in names], 60) == 10


def test_an_answer_of_a_source_that_came_meanwhile_is_recorded_under_its_own_key(monkeypatch):
    """P10: the source becomes another model while the journal looks for the answer of the first."""
    stage = staged()
    stage.journal = MemoryJournal(seconds=2.0)

    async def send(self, request, *, on_sent):
        on_sent()
        return stage.answer(request)

    monkeypatch.setattr(OpenAISource, "send", send)

    async def main(engine):
        scoring = batch(engine, 1)
        await asyncio.sleep(1)
        call, other = engine.judges["quality"].call(make_sample(0)), tree("a")
        other["sources"]["a"]["model"] = "another"
        engine._lifetime.given = {}
        await engine.reload(other)
        await scoring
        sources = (stage.simulated["a"], engine.upstreams["a"].source)
        old, new = (question_keys(call, {"a": source})["a"] for source in sources)
        assert (old != new, [*stage.journal.verdicts], stage.sent) == (True, [new], [])

    play(stage, tree("a"), main)


@in_virtual_time
async def test_a_held_source_stays_held_whatever_is_reloaded():
    held = []
    async with RewardEngine(make_config({"a": "http://x.invalid/v1", "b": "http://y.invalid/v1"})) as engine:
        engine.hold("a")
        for names in ("ab", "bc", "ab"):
            await engine.reload(make_config({name: f"http://{len(held)}{name}.invalid/v1" for name in names}))
            held.append([name for name, each in engine.statistics().sources.items() if each.state == "held"])
    assert held == [["a"], [], ["a"]]


# `engine.reload: on`: the file is looked at, and applied or refused as a whole. In real time


ON = {"reload": True}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "judges.yaml"
    write(path, tree("a", engine=ON))
    return path


def write(path, config):
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))


def deadline(seconds):
    return tree("a", engine={**ON, "deadline_s": seconds})


def watch(file, main, monkeypatch):
    monkeypatch.setattr(reloader, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(reloader, "SETTLED_S", 0.02)

    async def runs():
        sources = {name: SimulatedSource(name, behaviour=lambda *_: 0.0, answer=answer, model="m") for name in "ab"}
        async with RewardEngine(str(file), sources=sources) as engine:
            await engine.score(make_sample())
            await main(engine)

    asyncio.run(runs())


def told(caplog, what):
    return [record.getMessage() for record in caplog.records if what in record.getMessage()]


def test_a_change_of_the_file_is_applied_and_told_once(file, caplog, monkeypatch):
    async def main(engine):
        write(file, tree("b", engine=ON))
        await comes(lambda: list(engine.upstreams) == ["b"])
        assert (await engine.score(make_sample(1))).verdict.source == "b"
        # The same text in a new file, and another comment, are no news.
        write(file, "# again\n" + file.read_text())
        write(file.with_name("new"), deadline(9.0))
        os.replace(file.with_name("new"), file)
        await comes(lambda: engine.config.engine.deadline_s == 9.0)

    watch(file, main, monkeypatch)
    # At a level that Python shows without any configuration.
    first, *others = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert first.getMessage() == f"{file} was reloaded: sources.a: removed; sources.b: added"
    assert len(others) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sources: {a: {kind: openai", "YAML"),
        (tree("a", engine={"reload": True, "shared": "off"}), "engine.shared: this change needs"),
    ],
    ids=["half", "restart"],
)
def test_a_mistake_is_one_line_and_the_next_change_is_applied(file, caplog, text, said, monkeypatch):
    async def main(engine):
        write(file, text)
        await comes(lambda: told(caplog, "was not reloaded"))
        assert list(engine.upstreams) == ["a"]
        (line,) = told(caplog, "was not reloaded")
        assert said in line
        assert "\n" not in line
        write(file, tree("b", engine=ON))
        await comes(lambda: list(engine.upstreams) == ["b"])

    watch(file, main, monkeypatch)


def test_a_file_that_is_gone_or_half_written_is_no_news(file, monkeypatch):
    whole, before = yaml.safe_dump(deadline(3.0)).encode(), file.read_bytes()
    looks, reloads, changed = [b"", b"", whole[:40], whole, whole], [], []
    reload_file = reloader.Reloader._reload_file

    def reload(self):
        reloads.append(len(looks))
        reload_file(self)

    async def main(engine):
        await comes(lambda: reloads)
        write(file, deadline(3.0))
        changed.append(True)
        await comes(lambda: engine.config.engine.deadline_s == 3.0)

    monkeypatch.setattr(reloader, "_content", lambda path: (looks.pop(0) if looks else whole) if changed else before)
    monkeypatch.setattr(reloader.Reloader, "_reload_file", reload)
    watch(file, main, monkeypatch)
    assert reloads == [5, 0], "it is read when two looks in a row have found the same"


def test_a_file_below_the_keys_of_a_framework_is_read_again_with_them(file):
    config = tree("a")
    config["sources"]["a"]["base_url"] = "framework://reward/v1"
    write(file, config)
    layers = load_layers({"config": str(file), "engine": {"deadline_s": 9}})
    loaded = with_framework(layers, {"reward": "http://10.0.0.1:1"}, framework="it")
    config["sources"]["a"]["limits"] = {"concurrency": 3}
    write(file, config)
    again = origin_of(loaded).read()
    assert again.sources["a"].urls == ("http://10.0.0.1:1/v1",)
    assert (again.engine.deadline_s, again.sources["a"].limits.concurrency) == (9, 3)
    assert origin_of(again).read() == again


def test_without_a_file_the_engine_says_so():
    with pytest.raises(ConfigurationError, match="no file that could be watched"):
        RewardEngine(tree("a", engine=ON))
